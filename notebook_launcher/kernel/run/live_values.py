"""Live values of a run: the metrics, progress and phases of training that its ranks report."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from notebook_launcher.engines.live_records import pack_record
from notebook_launcher.history.schema import MetricPoint, RunChange, RunPicture
from notebook_launcher.kernel.metering.pace import Pace
from notebook_launcher.kernel.metering.sample_pace import SamplePace
from notebook_launcher.kernel.run.bounded_series import BoundedSeries
from notebook_launcher.kernel.run.live_phases import LivePhases
from notebook_launcher.kernel.run.live_settings import LiveSettings
from notebook_launcher.kernel.run.metric_series import MetricSeries
from notebook_launcher.messaging import messages
from notebook_launcher.wording.units import describe_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.engines.live_records import LiveRecords, Packed
    from notebook_launcher.history.schema import RankPhases

__all__ = ["LiveRecord", "LiveValues", "describe_change"]

LiveRecord = messages.Metrics | messages.ReportedPicture | messages.Progress | messages.Phases
"""A record that `LiveValues` takes."""

MAX_METRICS = 1_000_000
"""Points of `report(...)` that are kept; beyond this number the oldest are dropped."""
MAX_PICTURE_BYTES = 64_000_000
"""Bytes of pictures that are kept; beyond this number the oldest are dropped."""


class LoopProgress(NamedTuple):
    """Progress of the loop that a rank has reported last; `total` is None if it is unknown."""

    done: int
    total: int | None
    description: str


class LiveValues:
    """The values that the ranks of one run have reported. The run's thread writes them, any thread may read them."""

    def __init__(self, launched: float, num_ranks: int = 1) -> None:
        self.progress: dict[int, LoopProgress] = {}
        """By rank: the latest progress of a loop."""
        self.last_values: dict[int, dict[str, float]] = {}
        """By rank: the latest value of each metric."""
        self.last_steps: dict[int, int] = {}
        """By rank: the step of the latest metrics."""
        self.settings = LiveSettings()
        """Settings that can be changed."""
        self.changes: tuple[RunChange, ...] = ()
        """Settings that were changed."""
        self._metrics = MetricSeries(MAX_METRICS)
        self._pictures = BoundedSeries[RunPicture](MAX_PICTURE_BYTES, lambda picture: len(picture.data))
        self._phases = LivePhases(launched, num_ranks)
        self._launched = launched
        self._num_reported: dict[int, int] = {}
        """By rank: the number of `report(...)` calls, which stands in for a missing step."""
        self._item_rates: dict[int, Pace] = {}
        """By rank: the rate of its loop."""
        self._sample_rates: dict[int, SamplePace] = {}
        """By rank: the rate of samples, as its Accelerator counts them."""
        self._paused_at: float | None = None
        """Time of the pause that goes on; None: there is none."""
        self._folds = (self._fold_metrics, self._fold_progress, self._fold_phases)
        """By the place of a kind in `LIVE`: the method that adds a record of this kind."""

    def fold(self, rank: int, record: LiveRecord) -> None:
        """Add a record of a rank."""
        if isinstance(record, messages.ReportedPicture):
            self._keep_picture(rank, record)
        elif (packed := pack_record(rank, record)) is not None:
            self._folds[packed[0]](packed, 0.0)

    def fold_all(self, records: LiveRecords) -> None:
        """Add records of several ranks."""
        folds, offset = self._folds, records.offset
        for packed in records:
            folds[packed[0]](packed, offset)

    def _fold_metrics(self, packed: Packed, offset: float) -> None:
        _, rank, time, step, values = packed
        num_reported = self._num_reported.get(rank, 0)
        self._num_reported[rank] = num_reported + 1
        step = num_reported if step is None else step
        self._metrics.append(MetricPoint(rank=rank, step=step, time=time + offset - self._launched, values=values))
        self.last_steps[rank] = step
        if (last := self.last_values.get(rank)) is None:
            last = self.last_values[rank] = {}
        last.update(values)

    def _fold_progress(self, packed: Packed, offset: float) -> None:
        _, rank, time, done, total, description, loops, num_items = packed
        self.progress[rank] = LoopProgress(done, total, description)
        if (rate := self._item_rates.get(rank)) is None:
            rate = self._item_rates[rank] = Pace()
        rate.note(time + offset, num_items, loops)

    def _fold_phases(self, packed: Packed, offset: float) -> None:
        _, rank, time, _, _, num_samples, _, _, _, _, spans, settings, since = packed
        if (rate := self._sample_rates.get(rank)) is None:
            rate = self._sample_rates[rank] = SamplePace()
        rate.note(time + offset, num_samples, spans, since, offset)
        self._phases.add(rank, packed, offset)
        if settings:
            self.settings.take_reported(settings)

    @property
    def phases(self) -> dict[int, RankPhases]:
        """By rank: time spent on each phase of training, since the launch."""
        return self._phases.read()

    def note_change(self, record: messages.Changed) -> None:
        """Add the settings that were changed, and leave a pause that has ended out of all rates."""
        if record.action == "pause":
            self._paused_at = record.time
        elif record.action == "resume" and self._paused_at is not None:
            rates: list[Pace | SamplePace] = [*self._item_rates.values(), *self._sample_rates.values()]
            for rate in rates:
                rate.leave_out(self._paused_at, record.time)
            self._paused_at = None
        step, seconds = self.last_steps.get(0), record.time - self._launched
        self.settings.note_change(record)
        self.changes += tuple(
            RunChange(
                name=name,
                before=before,
                after=after,
                update=record.update,
                step=step,
                time=seconds,
                source=record.source,
            )
            for name, (before, after) in record.values.items()
        )

    def note_fewer_ranks(self, before: int, after: int, *, seconds: float) -> None:
        """Forget ranks that do not come back, and note it as a change; `seconds` is the age of the run."""
        reported = (
            self.progress,
            self.last_values,
            self.last_steps,
            self._num_reported,
            self._item_rates,
            self._sample_rates,
        )
        for by_rank in reported:
            for rank in range(after, before):
                by_rank.pop(rank, None)
        self._phases.forget(range(after, before))
        phases = self.phases
        update = phases[0].windows if 0 in phases else 0
        change = RunChange(
            name="num_processes",
            before=before,
            after=after,
            update=update,
            step=self.last_steps.get(0),
            time=seconds,
            source="launcher",
        )
        self.changes += (change,)

    @property
    def metrics(self) -> Sequence[MetricPoint]:
        """The metrics that are kept."""
        return self._metrics.since(0)[0]

    def metrics_since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
        """Return the metrics after a position, as far as they are kept, and the next position."""
        return self._metrics.since(position)

    @property
    def pictures(self) -> list[RunPicture]:
        """The pictures that are kept."""
        return self._pictures.values

    def pictures_since(self, position: int) -> tuple[list[RunPicture], int]:
        """Return the pictures after a position, as far as they are kept, and the next position."""
        return self._pictures.since(position)

    def items_per_second(self, rank: int) -> float | None:
        """Return the rate of the rank's loop, in items per second."""
        pace = self._item_rates.get(rank)
        return None if pace is None else pace.rate()

    def samples_per_second(self, rank: int, *, is_over: bool = False) -> float | None:
        """Return the samples of all ranks that the rank's Accelerator counts per second.

        Args:
            rank: The rank that counts.
            is_over: True for the mean of the whole training, False for the last seconds.
        """
        pace = self._sample_rates.get(rank)
        if pace is None:
            return None
        return pace.mean() if is_over else pace.rate()

    def _keep_picture(self, rank: int, record: messages.ReportedPicture) -> None:
        step = self.last_steps.get(rank, 0) if record.step is None else record.step
        seconds = record.time - self._launched
        self._pictures.append(
            RunPicture(rank=rank, step=step, time=seconds, name=record.name, mime=record.mime, data=record.data)
        )


def describe_change(record: messages.Changed) -> str:
    """Return `lr 0.1 → 0.05, after update 12`, or `paused after update 12`; empty if it is shown elsewhere."""
    if record.action in ("pause", "resume"):
        return f"{record.action}d after update {record.update}"
    words = [describe_values(name, before, after) for name, (before, after) in record.values.items()]
    return f"{', '.join(words)}, after update {record.update}" if words else ""
