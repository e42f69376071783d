"""The line of text that shows the progress of a run if no view does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from notebook_launcher.history.merged_progress import progress_line
from notebook_launcher.kernel.run.snapshots import take_rank_snapshots

if TYPE_CHECKING:
    from notebook_launcher.kernel.run.data import RunData

__all__ = ["QUIET", "ProgressLine"]

QUIET = 1.0
"""Seconds for which a run shows no progress, because it may be over before a person can read the line."""
INTERVAL = 0.5
"""Seconds between two lines."""


class ProgressLine:
    """Puts the line into a run's output; the run's thread updates it with each record of a rank."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        self._due = data.launched + QUIET

    def update(self) -> None:
        """Write the line again, if it is wanted and due."""
        data = self._data
        if not data.output.shows_progress:
            data.output.progress("")
            return
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + INTERVAL
        data.output.progress(progress_line(data.name, take_rank_snapshots(data)))
