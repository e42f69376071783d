"""Live values of a run: the metrics, progress and phases of training that its ranks report."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import TypeVar

from notebook_launcher.history.schema import (
    MAX_SPANS,
    MetricPoint,
    RankPhases,
    RunChange,
    RunPicture,
)
from notebook_launcher.kernel.metering.pace import Pace
from notebook_launcher.kernel.run.live_settings import LiveSettings
from notebook_launcher.kernel.run.phase_sums import PhaseSums
from notebook_launcher.messaging import messages
from notebook_launcher.wording.units import describe_values

__all__ = ["LiveRecord", "LiveValues", "describe_change"]

T = TypeVar("T")
LiveRecord = messages.Metrics | messages.ReportedPicture | messages.Progress | messages.Phases
"""A record that `LiveValues` takes."""

MAX_METRICS = 1_000_000
"""Points of `report(...)` that are kept; beyond this number the oldest are dropped."""
MAX_PICTURE_BYTES = 64_000_000
"""Bytes of pictures that are kept; beyond this number the oldest are dropped."""
ALL_SPANS = 131_072
"""Spans of phases that are kept of all ranks together: 15 MB. Each rank has an equal part, MAX_SPANS at most."""
MIN_SPANS = 64


class LiveValues:
    """The values that the ranks of one run have reported. The run's thread writes them, any thread may read them."""

    def __init__(self, launched: float, num_ranks: int = 1) -> None:
        self.progress: dict[int, messages.Progress] = {}
        """By rank: the latest progress of a loop."""
        self.last_values: dict[int, dict[str, float]] = {}
        """By rank: the latest value of each metric."""
        self.last_steps: dict[int, int] = {}
        """By rank: the step of the latest metrics."""
        self.settings = LiveSettings()
        """Settings that can be changed."""
        self.changes: tuple[RunChange, ...] = ()
        """Settings that were changed."""
        self._kept: tuple[list[MetricPoint], int] = ([], 0)
        """The kept metrics, and the number of dropped ones; one tuple, so that readers get both of one moment."""
        self._pictures: tuple[list[RunPicture], int] = ([], 0)
        """The pictures that are kept, and the number of dropped ones."""
        self._picture_bytes = 0
        self._phases: dict[int, PhaseSums] = {}
        self._adding = threading.Lock()
        """Held while phases are added or read."""
        self._num_samples: defaultdict[int, float] = defaultdict(float)
        """By rank: the samples of all records."""
        self._launched = launched
        self._max_spans = min(MAX_SPANS, max(MIN_SPANS, ALL_SPANS // num_ranks))
        self._num_reported: Counter[int] = Counter()
        """By rank: the number of `report(...)` calls, which stands in for a missing step."""
        self._items: defaultdict[int, Pace] = defaultdict(Pace)
        """By rank: the rate of its loop."""
        self._samples: defaultdict[int, Pace] = defaultdict(Pace)
        """By rank: the rate of samples, as its Accelerator counts them."""

    def fold(self, rank: int, record: LiveRecord) -> None:
        """Add a record of a rank."""
        match record:
            case messages.Metrics():
                self._keep(rank, record)
            case messages.ReportedPicture():
                self._keep_picture(rank, record)
            case messages.Progress():
                self.progress[rank] = record
                self._items[rank].note(record.time, record.items, record.loops)
            case messages.Phases():
                self._count_samples(rank, record)
                with self._adding:
                    if (sums := self._phases.get(rank)) is None:
                        sums = self._phases[rank] = PhaseSums(self._launched, self._max_spans)
                    sums.add(record)
                if record.settings:
                    self.settings.take_reported(record.settings)

    @property
    def phases(self) -> dict[int, RankPhases]:
        """By rank: time spent on each phase of training, since the launch."""
        with self._adding:
            return {rank: sums.read() for rank, sums in self._phases.items()}

    def note_change(self, record: messages.Changed) -> None:
        """Add the settings that were changed."""
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
        reported = (self.progress, self.last_values, self.last_steps, self._num_reported, self._items, self._samples)
        with self._adding:
            for by_rank in (*reported, self._phases, self._num_samples):
                for rank in range(after, before):
                    by_rank.pop(rank, None)
        update = self.phases[0].windows if 0 in self.phases else 0
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
    def metrics(self) -> list[MetricPoint]:
        """The metrics that are kept."""
        return self._kept[0]

    def metrics_since(self, position: int) -> tuple[list[MetricPoint], int]:
        """Return the metrics after a position, as far as they are kept, and the next position."""
        return _since(self._kept, position)

    @property
    def pictures(self) -> list[RunPicture]:
        """The pictures that are kept."""
        return self._pictures[0]

    def pictures_since(self, position: int) -> tuple[list[RunPicture], int]:
        """Return the pictures after a position, as far as they are kept, and the next position."""
        return _since(self._pictures, position)

    def items_per_second(self, rank: int) -> float | None:
        """Return the rate of the rank's loop, in items per second."""
        return self._items[rank].rate() if rank in self._items else None

    def samples_per_second(self, rank: int, *, is_over: bool = False) -> float | None:
        """Return the samples of all ranks that the rank's Accelerator counts per second.

        Args:
            rank: The rank that counts.
            is_over: True for the mean of the whole training, False for the last seconds.
        """
        if rank not in self._samples:
            return None
        return self._samples[rank].mean() if is_over else self._samples[rank].rate()

    def _count_samples(self, rank: int, record: messages.Phases) -> None:
        end = record.time
        if record.spans:
            (_, start, _), (_, last, seconds) = record.spans[0], record.spans[-1]
            end = last + seconds  # A rank sends the last record at the end of its function.
            if rank not in self._samples:
                self._samples[rank].note(min(start, record.since), 0.0)
        self._num_samples[rank] += record.samples
        self._samples[rank].note(end, self._num_samples[rank])

    def _keep(self, rank: int, record: messages.Metrics) -> None:
        step = self._num_reported[rank] if record.step is None else record.step
        self._num_reported[rank] += 1
        seconds = record.time - self._launched
        metrics, num_dropped = self._kept
        metrics.append(MetricPoint(rank=rank, step=step, time=seconds, values=record.values))
        self.last_steps[rank] = step
        self.last_values.setdefault(rank, {}).update(record.values)
        if len(metrics) > MAX_METRICS:
            num = MAX_METRICS // 10
            self._kept = (metrics[num:], num_dropped + num)

    def _keep_picture(self, rank: int, record: messages.ReportedPicture) -> None:
        step = self.last_steps.get(rank, 0) if record.step is None else record.step
        seconds = record.time - self._launched
        pictures, num_dropped = self._pictures
        pictures.append(
            RunPicture(rank=rank, step=step, time=seconds, name=record.name, mime=record.mime, data=record.data)
        )
        self._picture_bytes += len(record.data)
        if self._picture_bytes > MAX_PICTURE_BYTES:
            num = max(1, len(pictures) // 10)
            self._picture_bytes -= sum(len(picture.data) for picture in pictures[:num])
            self._pictures = (pictures[num:], num_dropped + num)


def _since(kept: tuple[list[T], int], position: int) -> tuple[list[T], int]:
    """Return the kept values after a position, and the next position; `kept` ends with the number of dropped ones."""
    values, num_dropped = kept
    start = max(0, position - num_dropped)
    new = values[start:]
    return new, num_dropped + start + len(new)


def describe_change(record: messages.Changed) -> str:
    """Return `lr 0.1 → 0.05, after update 12`, or `paused after update 12`; empty if it is shown elsewhere."""
    if record.action in ("pause", "resume"):
        return f"{record.action}d after update {record.update}"
    words = [describe_values(name, before, after) for name, (before, after) in record.values.items()]
    return f"{', '.join(words)}, after update {record.update}" if words else ""
