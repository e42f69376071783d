"""A run of this process as views read it, while it goes on and afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.history.schema import RunReader
from notebook_launcher.kernel.run import snapshots

if TYPE_CHECKING:
    from notebook_launcher.history.schema import MetricPoint, RunPicture, RunSnapshot
    from notebook_launcher.kernel.run.data import RunData

__all__ = ["LiveRunReader"]


class LiveRunReader(RunReader):
    """Reads the run data; from any thread."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        """The run data, which a reader only reads."""

    def snapshot(self) -> RunSnapshot:
        """Return everything that is known of the run at this moment, as plain data."""
        return snapshots.take_snapshot(self._data)

    def metrics_since(self, position: int) -> tuple[list[MetricPoint], int]:
        """Return the metrics reported after a position, and the next position; start with 0."""
        return self._data.live.metrics_since(position)

    def pictures_since(self, position: int) -> tuple[list[RunPicture], int]:
        """Return the pictures reported after a position, and the next position; start with 0."""
        return self._data.live.pictures_since(position)

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        """Return the text that a rank wrote after a position, and the next position; start with 0.

        A rank that a restart has left out is read, too: its log is still written to the run's folder.
        """
        return self._data.output.text_since(rank, position)

    def log_order(self, num_pieces: int) -> list[tuple[int, int]]:
        """Return the rank and the end of the newest pieces of output of all ranks, in the order of their arrival."""
        return self._data.output.text_order(num_pieces)
