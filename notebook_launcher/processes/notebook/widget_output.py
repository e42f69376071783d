"""ipywidgets' `Output` in a rank: what is printed and displayed inside `with output:` goes into the widget.

In a kernel, the page moves the messages of a cell into the widget. A rank's output has no such messages, so the
widget's own list of outputs gets it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["OutputCaptures"]

INTERVAL = 0.1
"""Seconds between two changes of a widget with much text, because each change sends the whole text."""
SMALL = 10_000
"""Characters of text up to which each line is sent at once."""
MAX_TEXT = 500_000
"""Characters of text that a widget keeps, the last ones."""


class OutputCaptures:
    """The `Output` widgets inside whose `with` block the rank is; the innermost one takes the output.

    Args:
        is_shown: Returns True if the page has a widget; others take nothing.
    """

    def __init__(self, is_shown: Callable[[Any], bool]) -> None:
        self._is_shown = is_shown
        self._open: list[_Capture | None] = []
        """One for each `with` block; None for a widget that takes nothing."""

    def patch(self, module: Any) -> None:
        """Have the class `Output` use these captures."""

        def enter(output: Any) -> Any:
            capture = _Capture(output) if self._is_shown(output) else None
            self._open.append(capture)
            if capture is not None:
                capture.begin()
            return output

        def leave(_output: Any, _kind: Any, error: BaseException | None, _tb: Any) -> bool:
            capture = self._open.pop()
            if capture is None:
                return False
            if isinstance(error, Exception):
                traceback.print_exception(error)
            capture.end()
            return isinstance(error, Exception)  # As in a kernel, where the widget shows the error.

        module.Output.__enter__ = enter
        module.Output.__exit__ = leave

    @property
    def innermost(self) -> _Capture | None:
        """The capture that takes what is displayed; None: the cell takes it."""
        return self._open[-1] if self._open else None


class _Capture:
    """One `with output:` block."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self._waiting: list[dict[str, Any]] = []
        """Outputs that the widget does not have yet."""
        self._clears = False
        """True if the next output replaces all earlier ones."""
        self._sent_at = 0.0
        self._redirects = contextlib.ExitStack()

    def begin(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._redirects.enter_context(contextlib.redirect_stdout(_Stream(self, "stdout")))
        self._redirects.enter_context(contextlib.redirect_stderr(_Stream(self, "stderr")))

    def end(self) -> None:
        self._redirects.close()
        self.flush()

    def text(self, name: str, text: str) -> None:
        """Add text of a stream."""
        self._add({"output_type": "stream", "name": name, "text": text})
        is_small = sum(len(output.get("text", "")) for output in self._output.outputs) < SMALL
        if ("\n" in text and is_small) or time.monotonic() - self._sent_at > INTERVAL:
            self.flush()

    def display(self, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Add rich output."""
        self._add({"output_type": "display_data", "data": dict(data), "metadata": dict(metadata)})
        self.flush()

    def clear(self, *, wait: bool) -> None:
        """Remove all output, now or when the next output comes."""
        self._waiting.clear()
        self._clears = wait
        if not wait:
            self._output.outputs = ()

    def flush(self) -> None:
        """Give the widget what it does not have yet."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._output.outputs = _joined([*self._output.outputs, *waiting])
        self._sent_at = time.monotonic()

    def _add(self, output: dict[str, Any]) -> None:
        if self._clears:
            self._clears = False
            self._output.outputs = ()
        self._waiting.append(output)


class _Stream(io.TextIOBase):
    """A standard stream whose text goes into a widget."""

    encoding = "utf-8"

    def __init__(self, capture: _Capture, name: str) -> None:
        self._capture = capture
        self._name = name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._capture.text(self._name, text)
        return len(text)


def _joined(outputs: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return outputs with adjacent texts of one stream as one, of which the end is kept."""
    joined: list[dict[str, Any]] = []
    for output in outputs:
        if joined and "text" in output and joined[-1].get("name") == output.get("name"):
            joined[-1] = {**output, "text": (joined[-1]["text"] + output["text"])[-MAX_TEXT:]}
        else:
            joined.append(output)
    return tuple(joined)
