"""The choice of a sink for a run's output, and the sink outside a kernel."""

from __future__ import annotations

import math
import shutil
import sys
import threading
from typing import TYPE_CHECKING, TextIO

from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.display.cell import CellSink, Sink
from notebook_launcher.wording import first_columns

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.engines.engine import Stream

__all__ = ["ShownOutput", "Sink", "StreamSink", "make_sink", "teller"]


def teller(config: LaunchConfig) -> Callable[[str], None]:
    """Return what shows a line at once, before a run has output of its own; nothing with `output="none"`."""
    return lambda text: None if config.output == "none" else make_sink().print(f"{text}\n")


def make_sink() -> Sink:
    """Return the sink for the output of the calling code; call it in the thread that launches."""
    shell = kernel_shell()
    return StreamSink() if shell is None else CellSink(shell)


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


# --------------------------------------------------------------------------------------------------------------------
# The output of a run beside its view.


class ShownOutput:
    """Output on its way to a sink, and what its view decides about it."""

    def __init__(self, sink: Sink, config: LaunchConfig) -> None:
        self.sink = sink
        """The cell, terminal or journal that gets the output."""
        self.has_headlines = config.output != "none"
        """True if the launcher's own first and last lines are shown."""
        self.shows_progress = config.monitor is not False and self.has_headlines and not sink.has_audience
        """True if a line of progress is shown, because no view is expected to show the progress."""
        self.picture_from = math.inf
        """Earliest time, by `time.monotonic()`, at which a picture instead of a line shows the end of the run."""
        self.last_line = ""
        """The run's last line, if the picture is to show it."""
