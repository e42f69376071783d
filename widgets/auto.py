"""Monitor that a run shows by itself; `notebook_launcher.kernel.views` imports it by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.widgets.monitor.monitor import Monitor

if TYPE_CHECKING:
    from notebook_launcher.history.schema import RunReader
    from notebook_launcher.kernel.display.sink import Sink


def show(run: RunReader, sink: Sink) -> Monitor:
    """Show the monitor of a run in its cell until the run is over, and return it."""
    monitor = Monitor(run)
    monitor.leaves_picture = False
    monitor.show(sink)
    return monitor
