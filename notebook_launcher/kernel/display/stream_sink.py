"""The sink for a run's output outside a kernel: a terminal, a file or a variable."""

from __future__ import annotations

import shutil
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

from notebook_launcher.wording.text import first_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.engines.events import Stream
    from notebook_launcher.messaging import messages

__all__ = ["StreamSink"]


class StreamSink:
    """A terminal, a log file, or whatever `sys.stdout` is."""

    is_cell = has_audience = is_brief = takes_comms = False
    message = None

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

    def print(self, text: str) -> None:
        """Write text."""
        self.text("stdout", text)

    def status(self, text: str) -> None:
        """Redraw one line in a terminal; elsewhere nothing is written, because it could not be removed again."""
        with self._lock:
            self._draw_status(" | ".join(text.split("\n")))

    def display(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,  # noqa: ARG002
        transient: Mapping[str, Any] | None = None,  # noqa: ARG002
        *,
        update: bool = False,  # noqa: ARG002
    ) -> None:
        """Write the plain text that every rich output carries."""
        self.text("stdout", f"{data.get('text/plain', '')}\n")

    def hold_after_cell(self) -> bool:
        """Return False, because a terminal shows what comes at any time."""
        return False

    def show_here(self) -> None:
        """Do nothing, because nothing was held."""

    def comm(self, record: messages.CommMessage) -> None:
        """Do nothing, because there is no page."""

    def html(self, html: str, text: str) -> None:  # noqa: ARG002
        """Write `text`."""
        self.text("stdout", f"{text}\n")

    def clear_output(self, *, wait: bool = False) -> None:
        """Do nothing, because written text stays."""

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function, here."""
        function(*args)

    def flush(self) -> None:
        """Do nothing, because every text is flushed when it is written."""

    def close(self) -> None:
        """Remove the live line."""
        self.status("")

    def _draw_status(self, text: str) -> None:
        if text == self._status or not sys.stdout.isatty():
            return
        self._status = text
        width = shutil.get_terminal_size().columns - 1
        _write(sys.stdout, "\r\x1b[K" + first_columns(text, width))


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()
