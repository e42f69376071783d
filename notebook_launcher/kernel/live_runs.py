"""`live_runs()`: handles on the runs in progress in this kernel, in case a handle was lost."""

from __future__ import annotations

from notebook_launcher.kernel.calls.checks import check_not_in_rank
from notebook_launcher.kernel.run.handle import Run
from notebook_launcher.kernel.run.thread import live_threads

__all__ = ["live_runs"]


def live_runs() -> list[Run]:
    """Return a handle on each run in progress in this kernel, the newest first: `live_runs()[0].stop()`.

    It finds a run whose handle no variable holds any more. Calls and cells of sessions in progress are among the runs.
    Detached runs are not, because hosts conduct them: `attach()` returns their handles.
    """
    check_not_in_rank("live_runs")
    threads = [
        thread for thread in live_threads() if not thread.data.over.is_set and not thread.data.scope.is_widget_call
    ]
    return [Run(thread) for thread in sorted(threads, key=lambda thread: thread.data.launched, reverse=True)]
