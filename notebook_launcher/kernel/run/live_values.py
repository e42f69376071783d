"""Live values of a run: the metrics, progress and phases of training that its ranks report."""

from __future__ import annotations

import collections
import itertools
import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

from notebook_launcher.engines.board import LIVE
from notebook_launcher.history.schema import (
    MAX_SPANS,
    MetricPoint,
    PhaseSpan,
    RankPhases,
    RunChange,
    RunPicture,
    RunSetting,
)
from notebook_launcher.kernel.metering import Pace, SamplePace
from notebook_launcher.messaging import messages
from notebook_launcher.settings.changes import ACCELERATOR_SETTINGS
from notebook_launcher.wording import WHOLE_RUN, describe_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
        self.metric_series = MetricSeries(MAX_METRICS)
        self.picture_series = BoundedSeries[RunPicture](MAX_PICTURE_BYTES, lambda picture: len(picture.data))
        self._phases: dict[int, PhaseSums] = {}
        self._phases_lock = threading.Lock()
        """Held while phases are added or read."""
        self._max_spans = min(MAX_SPANS, max(MIN_SPANS, ALL_SPANS // num_ranks))
        self._launched = launched
        self._num_reported: dict[int, int] = {}
        """By rank: the number of `report(...)` calls, which stands in for a missing step."""
        self._item_rates: dict[int, Pace] = {}
        """By rank: the rate of its loop."""
        self._sample_rates: dict[int, SamplePace] = {}
        """By rank: the rate of samples, as its Accelerator counts them."""
        self._paused_at: float | None = None
        """Time of the pause that goes on; None: there is none."""
        self._folds: dict[type[object], Callable[[int, Any, float], None]] = {
            messages.Metrics: self._fold_metrics,
            messages.Progress: self._fold_progress,
            messages.Phases: self._fold_phases,
        }

    def fold(self, rank: int, record: LiveRecord) -> None:
        """Add a record of a rank."""
        if isinstance(record, messages.ReportedPicture):
            self._keep_picture(rank, record)
        else:
            self._folds[type(record)](rank, record, 0.0)

    def fold_all(self, records: LiveRecords) -> None:
        """Add records of several ranks."""
        make: Any = tuple.__new__
        kinds, offset = [(kind, self._folds[kind]) for kind in LIVE], records.offset
        for packed in records:
            kind, fold = kinds[packed[0]]
            fold(packed[1], make(kind, packed[2:]), offset)

    def _fold_metrics(self, rank: int, record: messages.Metrics, offset: float) -> None:
        num_reported = self._num_reported.get(rank, 0)
        self._num_reported[rank] = num_reported + 1
        step = num_reported if record.step is None else record.step
        seconds = record.time + offset - self._launched
        self.metric_series.append(MetricPoint(rank=rank, step=step, time=seconds, values=record.values))
        self.last_steps[rank] = step
        if (last := self.last_values.get(rank)) is None:
            last = self.last_values[rank] = {}
        last.update(record.values)

    def _fold_progress(self, rank: int, record: messages.Progress, offset: float) -> None:
        known, is_whole = self.progress.get(rank), record.description == WHOLE_RUN
        if known is not None and known.description == WHOLE_RUN and not is_whole:
            return  # A loop inside the whole run, which is in view.
        self.progress[rank] = LoopProgress(record.done, record.total, record.description)
        if (rate := self._item_rates.get(rank)) is None:
            rate = self._item_rates[rank] = Pace()
        count, loop = (record.done, WHOLE_RUN) if is_whole else (record.items, record.loops)
        rate.note(record.time + offset, count, loop)

    def _fold_phases(self, rank: int, record: messages.Phases, offset: float) -> None:
        if (rate := self._sample_rates.get(rank)) is None:
            rate = self._sample_rates[rank] = SamplePace()
        rate.note(record.time + offset, record.samples, record.spans, record.since, offset)
        with self._phases_lock:
            if (sums := self._phases.get(rank)) is None:
                sums = self._phases[rank] = PhaseSums(self._launched, self._max_spans)
            sums.add(record, offset)
        if record.settings:
            self.settings.of_accelerator = record.settings

    @property
    def phases(self) -> dict[int, RankPhases]:
        """By rank: time spent on each phase of training, since the launch."""
        with self._phases_lock:
            return {rank: sums.read() for rank, sums in self._phases.items()}

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
            self._phases,
        )
        with self._phases_lock:
            for by_rank in reported:
                for rank in range(after, before):
                    by_rank.pop(rank, None)
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
        return self.metric_series.since(0)[0]

    @property
    def pictures(self) -> list[RunPicture]:
        """The pictures that are kept."""
        return self.picture_series.values

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
        self.picture_series.append(
            RunPicture(rank=rank, step=step, time=seconds, name=record.name, mime=record.mime, data=record.data)
        )


def describe_change(record: messages.Changed) -> str:
    """Return `lr 0.1 → 0.05, after update 12`, or `paused after update 12`; empty if it is shown elsewhere."""
    if record.action in ("pause", "resume"):
        return f"{record.action}d after update {record.update}"
    words = [describe_values(name, before, after) for name, (before, after) in record.values.items()]
    return f"{', '.join(words)}, after update {record.update}" if words else ""


# --------------------------------------------------------------------------------------------------------------------
# Time that one rank has spent on each phase of training, summed up from its records.


class PhaseSums:
    """The phases of one rank. The caller sees to it that one thread at a time adds or reads.

    Args:
        launched: Time of the launch, from which spans are counted.
        max_spans: Number of the newest spans that are kept.
    """

    def __init__(self, launched: float, max_spans: int) -> None:
        self._launched = launched
        self._num_windows = self._num_micro_batches = self._num_fullest = 0
        self._samples = 0.0
        self._fullest: tuple[int, float] = (0, 0.0)
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        # As they came: of a thousand ranks most spans are dropped before anyone reads them, and the garbage collector
        # passes over tuples of plain values.
        self._new_spans: collections.deque[tuple[str, float, float]] = collections.deque(maxlen=max_spans)
        """Spans since the last reading: phase, time of the start, seconds."""
        self._offset = 0.0
        """Seconds to add to the times of these spans."""
        self._max_spans = max_spans
        self._read: RankPhases | None = RankPhases()
        """The sums as they were last read; None: records have been added since."""
        self._read_spans: tuple[PhaseSpan, ...] = ()

    def add(self, record: messages.Phases, offset: float) -> None:
        """Add a record; `offset`: seconds by which the clock of this machine is ahead of the rank's."""
        if offset != self._offset:
            self.read()  # The spans that wait have the times of another clock, or are shifted by the old measurement.
            self._offset = offset
        self._read = None
        self._num_windows += record.windows
        self._num_micro_batches += record.micro_batches
        self._samples += record.samples
        seconds, counts = self._seconds, self._counts
        for phase, length in record.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + length
        for phase, number in record.counts.items():
            counts[phase] = counts.get(phase, 0) + number
        if (fullest := record.fullest) >= self._fullest:
            self._num_fullest = record.num_fullest + (self._num_fullest if fullest == self._fullest else 0)
            self._fullest = fullest
        self._new_spans.extend(record.spans)

    def read(self) -> RankPhases:
        """Return the sums."""
        if self._read is None:
            shift = self._offset - self._launched
            new = tuple(
                [
                    PhaseSpan(phase=phase, start=start + shift, seconds=length)
                    for phase, start, length in self._new_spans
                ]
            )
            self._new_spans.clear()
            kept = self._read_spans
            self._read_spans = kept[max(0, len(kept) + len(new) - self._max_spans) :] + new
            self._read = RankPhases(
                windows=self._num_windows,
                micro_batches=self._num_micro_batches,
                samples=self._samples,
                fullest=self._fullest,
                num_fullest=self._num_fullest,
                seconds=dict(self._seconds),
                counts=dict(self._counts),
                spans=self._read_spans,
            )
        return self._read


# --------------------------------------------------------------------------------------------------------------------
# The metrics that ranks have reported, packed: a million points take 50 MB, and as objects 420.


CHUNK = 4096
"""Points that are packed together. The newest ones, up to this number, stay objects."""


class _Chunk(NamedTuple):
    """Points in columns, an element for each of them."""

    ranks: array[int]
    steps: array[int]
    times: array[float]
    names: tuple[tuple[str, ...], ...]
    """All different sets of names."""
    named: array[int]
    """The places of the points' sets in `names`."""
    values: array[float]
    """The values of all points, one after the other."""


class MetricSeries:
    """Points in the order in which they came; beyond a limit the oldest tenth is dropped.

    One thread appends, any thread reads.

    Args:
        limit: The greatest number of points that are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: tuple[tuple[_Chunk | list[MetricPoint], ...], list[MetricPoint], int] = (), [], 0
        """The chunks, each of `CHUNK` points, the newest points, and the number of dropped ones; one tuple, so that
        readers get all of one moment."""

    def append(self, point: MetricPoint) -> None:
        """Add a point."""
        chunks, newest, num_dropped = self._kept
        newest.append(point)
        if len(newest) < CHUNK:
            return
        chunks = (*chunks, _packed(newest))
        if len(chunks) * CHUNK > self._limit:
            num_chunks = max(1, len(chunks) // 10)
            chunks, num_dropped = chunks[num_chunks:], num_dropped + num_chunks * CHUNK
        self._kept = chunks, [], num_dropped

    def since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
        """Return the points after a position, as far as they are kept, and the next position; the first is 0."""
        chunks, newest, num_dropped = self._kept
        first, skip = divmod(max(0, position - num_dropped), CHUNK)
        packed, latest = chunks[first:], newest[:]
        end = num_dropped + len(chunks) * CHUNK + len(latest)
        return (_Points(packed, latest, skip) if packed else latest[skip:]), end


class _Points(Sequence[MetricPoint]):
    """Points that are unpacked as they are read, so that a reader of them all needs no memory for them all.

    Args:
        chunks: The chunks.
        newest: Points after them.
        skip: Number of points of the first chunk that are left out.
    """

    def __init__(self, chunks: Sequence[_Chunk | list[MetricPoint]], newest: list[MetricPoint], skip: int) -> None:
        self._chunks, self._newest, self._skip = chunks, newest, skip

    def __len__(self) -> int:
        return len(self._chunks) * CHUNK + len(self._newest) - self._skip

    def __iter__(self) -> Iterator[MetricPoint]:
        parts = itertools.chain(map(_unpacked, self._chunks), (self._newest,))
        return itertools.islice(itertools.chain.from_iterable(parts), self._skip, None)

    @overload
    def __getitem__(self, at: int) -> MetricPoint: ...
    @overload
    def __getitem__(self, at: slice) -> list[MetricPoint]: ...
    def __getitem__(self, at: int | slice) -> MetricPoint | list[MetricPoint]:
        if isinstance(at, slice):
            return list(self)[at]
        chunk, place = divmod(range(len(self))[at] + self._skip, CHUNK)
        return self._newest[place] if chunk == len(self._chunks) else _unpacked(self._chunks[chunk])[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # as of a list

    def __reduce__(self) -> tuple[type[list[MetricPoint]], tuple[list[MetricPoint]]]:
        return list, (list(self),)


def _packed(points: list[MetricPoint]) -> _Chunk | list[MetricPoint]:
    """Return the points in columns; as they are, if a number does not fit."""
    names: dict[tuple[str, ...], int] = {}
    try:
        return _Chunk(
            ranks=array("i", [point.rank for point in points]),
            steps=array("q", [point.step for point in points]),
            times=array("d", [point.time for point in points]),
            named=array("i", [names.setdefault(tuple(point.values), len(names)) for point in points]),
            names=tuple(names),
            values=array("d", [value for point in points for value in point.values.values()]),
        )
    except OverflowError:
        return points


def _unpacked(chunk: _Chunk | list[MetricPoint]) -> list[MetricPoint]:
    if isinstance(chunk, list):
        return chunk
    values = iter(chunk.values)
    return [
        # Names come first in `zip`: what it takes from `values` for a name that is not there would be lost.
        MetricPoint(rank=rank, step=step, time=time, values=dict(zip(chunk.names[named], values)))  # noqa: B905
        for rank, step, time, named in zip(chunk.ranks, chunk.steps, chunk.times, chunk.named, strict=True)
    ]


# --------------------------------------------------------------------------------------------------------------------
# A series of values of bounded size, of which readers take what is new to them.


T = TypeVar("T")


class BoundedSeries(Generic[T]):
    """Values in the order in which they came; beyond a limit the oldest tenth is dropped.

    One thread appends, any thread reads.

    Args:
        limit: The greatest sum of the sizes of the values that are kept.
        size_of: Returns the size of a value.
    """

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
