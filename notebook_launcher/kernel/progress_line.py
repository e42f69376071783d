"""The line of text that says how far a run is, where no view does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from notebook_launcher.history.merged_progress import progress_line
from notebook_launcher.kernel.snapshots import take_rank_snapshot

if TYPE_CHECKING:
    from notebook_launcher.kernel.run_thread import RunThread

__all__ = ["QUIET", "ProgressLine"]

QUIET = 1.0
"""Seconds for which a run shows nothing of how far it is: it may be over before anybody has read it."""
INTERVAL = 0.5
"""Seconds between two lines."""


class ProgressLine:
    """Puts the line into a run's output; called by the run's thread with each record of a rank."""

    def __init__(self, launched: float) -> None:
        self._due = launched + QUIET

    def update(self, thread: RunThread) -> None:
        """Renew the line, if it is wanted and due."""
        if not thread.output.shows_progress:
            thread.output.progress("")
            return
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + INTERVAL
        ranks = [take_rank_snapshot(thread, rank) for rank in range(thread.ranks.plan.num_processes)]
        thread.output.progress(progress_line(thread.name, ranks))
