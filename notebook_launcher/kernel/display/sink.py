"""Sinks, the destinations of a run's output: their common base, the one outside a kernel, and the choice of one."""

from __future__ import annotations

import shutil
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.wording import first_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.engines.engine import Stream
    from notebook_launcher.messaging import messages


class Sink:
    """Destination of output, used from any thread; by itself one that keeps nothing and has no page behind it."""

    @property
    def is_cell(self) -> bool:
        """True for a cell, which keeps its output; False for a terminal, a file or a variable."""
        return False

    @property
    def has_audience(self) -> bool:
        """True for a cell that a person may look at, in a front end that may draw widgets."""
        return False

    @property
    def is_brief(self) -> bool:
        """True for a cell that an agent reads, whose output is short."""
        return False

    @property
    def takes_comms(self) -> bool:
        """True if the page of this cell may show widgets."""
        return False

    @property
    def message(self) -> Any:
        """The message that started the cell; None without a cell."""
        return None

    def hold_after_cell(self) -> bool:
        """Where no person looks, hold what comes after the cell's end for the cell that calls `show_here`.

        Return False where a person looks.
        """
        return False

    def show_here(self) -> None:
        """Show what was held, and what is to come, in the cell that runs now."""

    def text(self, stream: Stream, text: str) -> None:
        """Append text."""

    def print(self, text: str) -> None:
        """Append text to standard output as the calling code prints, after all output that was sent."""
        self.text("stdout", text)

    def status(self, text: str) -> None:
        """Redraw the live area; an empty text removes it."""

    def display(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,  # noqa: ARG002
        transient: Mapping[str, Any] | None = None,  # noqa: ARG002
        *,
        update: bool = False,  # noqa: ARG002
    ) -> None:
        """Show rich output, or update the one with the same `display_id`; here the plain text that each carries."""
        self.text("stdout", f"{data.get('text/plain', '')}\n")

    def html(self, html: str, text: str) -> None:
        """Show HTML, or `text` where there is no HTML."""
        self.display({"text/html": html, "text/plain": text})

    def comm(self, record: messages.CommMessage) -> None:
        """Send a message of a comm to the page."""

    def clear_output(self, *, wait: bool = False) -> None:
        """Clear what is there, at once or when the next output comes."""

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function that publishes, in the thread that publishes, after all earlier output."""
        function(*args)

    def flush(self) -> None:
        """Wait until all is sent."""

    def close(self) -> None:
        """Remove the live area; later output is still taken."""
        self.status("")


def teller(config: LaunchConfig) -> Callable[[str], None]:
    """Return what shows a line at once, before a run has output of its own; nothing with `output="none"`."""
    return lambda text: None if config.output == "none" else make_sink().print(f"{text}\n")


def make_sink() -> Sink:
    """Return the sink for the output of the calling code; call it in the thread that launches."""
    shell = kernel_shell()
    if shell is None:
        return StreamSink()
    from notebook_launcher.kernel.display.cell import CellSink

    return CellSink(shell)


# --------------------------------------------------------------------------------------------------------------------
# The sink for a run's output outside a kernel: a terminal, a file or a variable.


class StreamSink(Sink):
    """A terminal, a log file, or whatever `sys.stdout` is; what it has written stays."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._status = ""

    def text(self, stream: Stream, text: str) -> None:
        """Write text."""
        with self._lock:
            status = self._status
            self._draw_status("")
            _write(getattr(sys, stream), text)
            self._draw_status(status)

    def status(self, text: str) -> None:
        """Redraw one line in a terminal; elsewhere nothing is written, because it could not be removed again."""
        with self._lock:
            self._draw_status(" | ".join(text.split("\n")))

    def _draw_status(self, text: str) -> None:
        if text == self._status or not sys.stdout.isatty():
            return
        self._status = text
        width = shutil.get_terminal_size().columns - 1
        _write(sys.stdout, "\r\x1b[K" + first_columns(text, width))


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()
