"""A run of this process as views and users read it, while it goes on and afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.history.schema import RunMetrics, RunReader
from notebook_launcher.kernel.run import snapshots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.drawing.run_report import RunReport
    from notebook_launcher.history.schema import (
        MetricPoint,
        RankPhases,
        RankSnapshot,
        RunChange,
        RunPicture,
        RunSnapshot,
        RunState,
    )
    from notebook_launcher.kernel.run.data import RunData

__all__ = ["LiveRunReader"]


class LiveRunReader(RunReader):
    """Reads the run data; from any thread."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        """The run data, which a reader only reads."""

    @property
    def id(self) -> str:
        """Identifier of the run: the time, the function, six random digits."""
        return self._data.id

    @property
    def name(self) -> str:
        """Name of the run: as edited, else as launched, else the function's name."""
        return self._data.edits["name"] or self._data.name

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run: as edited, else as launched."""
        edited = self._data.edits["tags"]
        return self.config.tags if edited is None else tuple(edited)

    @property
    def notes(self) -> str:
        """Notes that `edit` has written; empty if there are none."""
        return self._data.edits["notes"] or ""

    @property
    def last_line(self) -> str:
        """The last line of a run's output, where a picture or a client shows it."""
        return self._data.output.last_line

    @property
    def config(self) -> LaunchConfig:
        """The options as given."""
        return self._data.plan.config

    @property
    def state(self) -> RunState:
        """`"starting"`, `"running"`, `"paused"`, `"stopping"`, then `"done"`, `"failed"` or `"stopped"`.

        The state is `"waiting"` while ranks have waited for longer than `hang_notice` in a collective which other
        ranks have not entered; `run.snapshot().waiting` names the ranks and the collective.
        """
        return snapshots.state_of(self._data)

    @property
    def seed(self) -> int | None:
        """The seed of the launch; None: its ranks began with the random states of the kernel."""
        return self._data.plan.seed

    @property
    def ranks(self) -> tuple[RankSnapshot, ...]:
        """Present state of each rank."""
        return snapshots.take_rank_snapshots(self._data)

    @property
    def metrics(self) -> RunMetrics:
        """Metrics that the ranks have reported so far, in the order of arrival."""
        return RunMetrics(self._data.live.metrics)

    @property
    def pictures(self) -> tuple[RunPicture, ...]:
        """Images and histograms that the ranks have reported so far, in the order of arrival."""
        return tuple(self._data.live.pictures)

    @property
    def phases(self) -> dict[int, RankPhases]:
        """Time that each rank spent on each phase of training, as reported by its Accelerator."""
        return self._data.live.phases

    @property
    def changes(self) -> tuple[RunChange, ...]:
        """Settings that `set` has changed so far: name, values before and after, and the update."""
        return self._data.live.changes

    def snapshot(self) -> RunSnapshot:
        """Return everything that is known of the run at this moment, as plain data."""
        return snapshots.take_snapshot(self._data)

    def report(self) -> RunReport:
        """Return what is known of the run in plain values: a dict, which `print` shows as text and `to_json()` as JSON.

        State, ranks, who waits where, the first error with its line, metrics (last, lowest, highest), the rank that the
        others wait for, and what to type next; at any time, also after the run's end.
        """
        from notebook_launcher.drawing.run_report import report_on

        return report_on(self)

    def metrics_since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
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
