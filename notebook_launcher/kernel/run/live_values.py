"""Live values of a run: the metrics, progress and phases of training that its ranks report."""

from __future__ import annotations

import collections
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from notebook_launcher.history import schema
from notebook_launcher.history.schema import MetricPoint, PhaseSpan, RunChange, RunPicture, RunSetting
from notebook_launcher.kernel.metering import Pace, SamplePace
from notebook_launcher.messaging import messages
from notebook_launcher.settings.changes import ACCELERATOR_SETTINGS
from notebook_launcher.wording import WHOLE_RUN, describe_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.engines.board import LiveRecords


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
        """By rank: the latest progress of a loop; its `total` is None if it is unknown."""
        self.last_values: dict[int, dict[str, float]] = {}
        """By rank: the latest value of each metric."""
        self.last_steps: dict[int, int] = {}
        """By rank: the step of the latest metrics."""
        self.settings = LiveSettings()
        """Settings that can be changed."""
        self.changes: tuple[RunChange, ...] = ()
        """Settings that were changed."""
        self.metric_series = MetricSeries(MAX_METRICS)
        self.picture_series = BoundedSeries[RunPicture](MAX_PICTURE_BYTES, lambda picture: len(picture.data))
        self._phases: dict[int, PhaseSums] = {}
        self._phases_lock = threading.Lock()
        """Held while phases are added or read."""
        self._max_spans = min(schema.MAX_SPANS, max(MIN_SPANS, ALL_SPANS // num_ranks))
        self._launched = launched
        self._num_reported: collections.Counter[int] = collections.Counter()
        """By rank: the number of `report(...)` calls, which stands in for a missing step."""
        self._item_rates: collections.defaultdict[int, Pace] = collections.defaultdict(Pace)
        """By rank: the rate of its loop."""
        self._sample_rates: collections.defaultdict[int, SamplePace] = collections.defaultdict(SamplePace)
        """By rank: the rate of samples, as its Accelerator counts them."""
        self._paused_at: float | None = None
        """Time of the pause that goes on; None: there is none."""
        self._folds: dict[type[object], Callable[[int, Any, float], None]] = {
            messages.Metrics: self._fold_metrics,
            messages.ReportedPicture: self._fold_picture,
            messages.Progress: self._fold_progress,
            messages.Phases: self._fold_phases,
        }

    def fold(self, rank: int, record: LiveRecord) -> None:
        """Add a record of a rank."""
        self._folds[type(record)](rank, record, 0.0)

    def fold_all(self, records: LiveRecords) -> None:
        """Add records of several ranks."""
        for rank, record in records:
            self._folds[type(record)](rank, record, records.offset)

    # `offset`: seconds by which the clock of this machine is ahead of the rank's.

    def _fold_metrics(self, rank: int, record: messages.Metrics, offset: float) -> None:
        step = self._num_reported[rank] if record.step is None else record.step
        self._num_reported[rank] += 1
        seconds = record.time + offset - self._launched
        self.metric_series.append(MetricPoint(rank=rank, step=step, time=seconds, values=record.values))
        self.last_steps[rank] = step
        self.last_values.setdefault(rank, {}).update(record.values)

    def _fold_picture(self, rank: int, record: messages.ReportedPicture, offset: float) -> None:
        step = self.last_steps.get(rank, 0) if record.step is None else record.step
        seconds = record.time + offset - self._launched
        self.picture_series.append(
            RunPicture(rank=rank, step=step, time=seconds, name=record.name, mime=record.mime, data=record.data)
        )

    def _fold_progress(self, rank: int, record: messages.Progress, offset: float) -> None:
        known, is_whole = self.progress.get(rank), record.description == WHOLE_RUN
        if known is not None and known.description == WHOLE_RUN and not is_whole:
            return  # A loop inside the whole run, which is in view.
        self.progress[rank] = record
        count, loop = (record.done, WHOLE_RUN) if is_whole else (record.items, record.loops)
        self._item_rates[rank].note(record.time + offset, count, loop)

    def _fold_phases(self, rank: int, record: messages.Phases, offset: float) -> None:
        self._sample_rates[rank].add(record.time + offset, record.samples, record.spans, record.since, offset)
        with self._phases_lock:
            sums = self._phases.setdefault(rank, PhaseSums(self._max_spans))
            sums.add(record, offset - self._launched)
        if record.settings:
            self.settings.of_accelerator = record.settings

    @property
    def phases(self) -> dict[int, schema.RankPhases]:
        """By rank: time spent on each phase of training, since the launch."""
        with self._phases_lock:
            return {rank: sums.read() for rank, sums in self._phases.items()}

    def note_change(self, record: messages.Changed) -> None:
        """Add the settings that were changed, and leave a pause that has ended out of all rates."""
        if record.action == "pause":
            self._paused_at = record.time
        elif record.action == "resume" and self._paused_at is not None:
            for rate in (*self._item_rates.values(), *self._sample_rates.values()):
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
        shown = (self.progress, self.last_values, self.last_steps)
        counted = (self._num_reported, self._item_rates, self._sample_rates, self._phases)
        with self._phases_lock:
            for by_rank in (*shown, *counted):
                for rank in range(after, before):
                    by_rank.pop(rank, None)
        phases = self.phases
        change = RunChange(
            name="num_processes",
            before=before,
            after=after,
            update=phases[0].windows if 0 in phases else 0,
            step=self.last_steps.get(0),
            time=seconds,
            source="launcher",
        )
        self.changes += (change,)

    def items_per_second(self, rank: int) -> float | None:
        """Return the rate of the rank's loop, in items per second."""
        pace = self._item_rates.get(rank)
        return None if pace is None else pace.rate()

    def samples_per_second(self, rank: int, *, is_over: bool = False) -> float | None:
        """Return the samples of all ranks that the rank's Accelerator counts per second.

        With `is_over` it is the mean of the whole training, otherwise that of the last seconds.
        """
        pace = self._sample_rates.get(rank)
        return None if pace is None else pace.mean() if is_over else pace.rate()


def describe_change(record: messages.Changed) -> str:
    """Return `lr 0.1 → 0.05, after update 12`, or `paused after update 12`; empty if it is shown elsewhere."""
    if record.action in ("pause", "resume"):
        return f"{record.action}d after update {record.update}"
    words = [describe_values(name, before, after) for name, (before, after) in record.values.items()]
    return f"{', '.join(words)}, after update {record.update}" if words else ""


class PhaseSums:
    """Time that one rank has spent on each phase of training, summed up from its records, and the newest spans."""

    def __init__(self, max_spans: int) -> None:
        self._num_windows = self._num_micro_batches = self._num_fullest = 0
        self._samples = 0.0
        self._fullest: tuple[int, float] = (0, 0.0)
        self._seconds: collections.Counter[str] = collections.Counter()
        self._counts: collections.Counter[str] = collections.Counter()
        self._spans: collections.deque[PhaseSpan] = collections.deque(maxlen=max_spans)
        # As they came: of a thousand ranks most spans are dropped before anyone reads them.
        self._new_spans: collections.deque[tuple[str, float, float]] = collections.deque(maxlen=max_spans)
        """Spans since the last reading: phase, time of the start by the rank's clock, seconds."""
        self._shift = 0.0
        """Seconds from that clock to the time since the launch."""

    def add(self, record: messages.Phases, shift: float) -> None:
        """Add a record; `shift`: seconds from the time of the rank's clock to the time since the launch."""
        self._num_windows += record.windows
        self._num_micro_batches += record.micro_batches
        self._samples += record.samples
        self._seconds.update(record.seconds)
        self._counts.update(record.counts)
        if (fullest := record.fullest) >= self._fullest:
            self._num_fullest = record.num_fullest + (self._num_fullest if fullest == self._fullest else 0)
            self._fullest = fullest
        if shift != self._shift:
            self._take_new_spans()  # They have the times of another clock, or are shifted by the old measurement.
            self._shift = shift
        self._new_spans.extend(record.spans)

    def _take_new_spans(self) -> None:
        for phase, start, length in self._new_spans:
            self._spans.append(PhaseSpan(phase=phase, start=start + self._shift, seconds=length))
        self._new_spans.clear()

    def read(self) -> schema.RankPhases:
        """Return the sums."""
        self._take_new_spans()
        return schema.RankPhases(
            windows=self._num_windows,
            micro_batches=self._num_micro_batches,
            samples=self._samples,
            fullest=self._fullest,
            num_fullest=self._num_fullest,
            seconds=dict(self._seconds),
            counts=dict(self._counts),
            spans=tuple(self._spans),
        )


# --------------------------------------------------------------------------------------------------------------------
# Series of bounded size, of which readers take what is new to them: one thread appends, any thread reads.


CHUNK = 4096
"""Points that are packed together. The newest ones, up to this number, stay objects."""


class MetricSeries:
    """Metrics in the order in which they came; beyond a limit the oldest tenth is dropped.

    They are packed: a million points take 50 MB, and as objects 420.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: tuple[tuple[bytes, ...], list[MetricPoint], int] = (), [], 0
        """The chunks, each of `CHUNK` points, the newest points, and the number of dropped ones; one tuple, so that
        readers get all of one moment."""

    def append(self, point: MetricPoint) -> None:
        """Add a point."""
        chunks, newest, num_dropped = self._kept
        newest.append(point)
        if len(newest) < CHUNK:
            return
        # Each name is an object that all points share, which is then pickled once.
        rows = [
            (p.rank, p.step, p.time, {sys.intern(str(name)): value for name, value in p.values.items()}) for p in newest
        ]
        chunks = (*chunks, pickle.dumps(rows))
        if len(chunks) * CHUNK > self._limit:
            num_chunks = max(1, len(chunks) // 10)
            chunks, num_dropped = chunks[num_chunks:], num_dropped + num_chunks * CHUNK
        self._kept = chunks, [], num_dropped

    def since(self, position: int) -> tuple[list[MetricPoint], int]:
        """Return the points after a position, as far as they are kept, and the next position; the first is 0."""
        chunks, newest, num_dropped = self._kept
        newest = newest.copy()  # Points may come while the chunks are read.
        start = max(0, position - num_dropped)
        first = min(start // CHUNK, len(chunks))  # While the newest points are packed, they are as many as a chunk has.
        rows = (row for chunk in chunks[first:] for row in pickle.loads(chunk))
        points = [MetricPoint(rank=rank, step=step, time=at, values=values) for rank, step, at, values in rows]
        points += newest
        end = num_dropped + len(chunks) * CHUNK + len(newest)
        return points[start - first * CHUNK :], end


T = TypeVar("T")


class BoundedSeries(Generic[T]):
    """Values in the order in which they came; beyond a limit on the sum of their sizes the oldest tenth is dropped."""

    def __init__(self, limit: int, size_of: Callable[[T], int]) -> None:
        self._limit, self._size_of = limit, size_of
        self._size = 0
        self._kept: tuple[list[T], int] = ([], 0)
        """The kept values, and the number of dropped ones; one tuple, so that readers get both of one moment."""

    @property
    def values(self) -> list[T]:
        """The values that are kept."""
        return self._kept[0]

    def append(self, value: T) -> None:
        """Add a value."""
        self._kept[0].append(value)
        self._size += self._size_of(value)
        if self._size > self._limit:
            values, num_dropped = self._kept
            num = max(1, len(values) // 10)
            self._size -= sum(map(self._size_of, values[:num]))
            self._kept = (values[num:], num_dropped + num)

    def since(self, position: int) -> tuple[list[T], int]:
        """Return the values after a position, as far as they are kept, and the next position; the first is 0."""
        values, num_dropped = self._kept
        start = max(0, position - num_dropped)
        new = values[start:]
        return new, num_dropped + start + len(new)


# --------------------------------------------------------------------------------------------------------------------
# Settings of a run that can be changed while it goes on, with their last known values.


class LiveSettings:
    """The settings that the ranks of one run offer. The run's thread writes them, any thread may read them."""

    def __init__(self) -> None:
        self.of_accelerator: Mapping[str, float | None] = {}
        """By name: the settings of the Accelerator that carries changes out, empty until it made an update; or those of
        a trainer of another library that does so."""
        self.tunables: dict[str, float] = {}
        """By name: the settings that the function offers."""
        self.trainer: messages.TrainerMade | None = None
        """The trainer of another library that makes the updates; None: there is none."""

    def note_trainer(self, record: messages.TrainerMade) -> None:
        """Note a trainer of another library; the first one counts until one trains that takes requests."""
        if self.trainer is None or record.settings:
            self.trainer = record
        self.of_accelerator = record.settings or self.of_accelerator

    def note_change(self, record: messages.Changed) -> None:
        """Take the new values of a change, which is reported before the first record of phases that has them, too."""
        after = {name: new for name, (_, new) in record.values.items()}
        own = {name: new for name, new in after.items() if name in ACCELERATOR_SETTINGS}
        self.of_accelerator = {**self.of_accelerator, **own}
        self.tunables.update({name: new for name, new in after.items() if name in self.tunables and new is not None})

    def forget(self) -> None:
        """Forget what ranks of an earlier attempt offered."""
        self.of_accelerator, self.tunables, self.trainer = {}, {}, None

    def present(self) -> tuple[RunSetting, ...]:
        """Return all settings with their last known values."""
        own = [
            RunSetting(name=name, value=value, kind=ACCELERATOR_SETTINGS[name])
            for name, value in self.of_accelerator.items()
        ]
        offered = [
            RunSetting(
                name=name,
                value=value,
                kind="switch" if isinstance(value, bool) else "integer" if isinstance(value, int) else "number",
            )
            for name, value in dict(self.tunables).items()
        ]
        return (*own, *offered)
