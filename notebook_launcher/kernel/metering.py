"""The use of memory, processors and GPUs by the ranks, and the pace of training."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from notebook_launcher.history.schema import RankUsage
from notebook_launcher.machine import devices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.engines.engine import Tree


# --------------------------------------------------------------------------------------------------------------------
# Memory and load of a run's ranks over time, read from outside, without any work of the ranks.


T = TypeVar("T")

FIRST_AFTER = 1.0
"""Seconds after the launch at which the first sample is taken: shorter runs do not pay for any."""
INTERVAL = 1.0
"""Seconds between two samples at first."""
MAX_SAMPLES = 512
"""Samples that are kept of a rank. Beyond this number, pairs of samples are merged, and the interval is doubled."""
ALL_SAMPLES = 8192
"""Samples that are kept of all ranks together, since every summary of the run is written with them."""
MIN_SAMPLES = 64
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class UsageMeter:
    """Samples the memory and the load of one run's ranks; the run's thread drives it, any thread may read `usage`."""

    def __init__(self, launched: float, num_ranks: int) -> None:
        self.usage: dict[int, RankUsage] = {}
        """The samples, by rank."""
        self._launched = launched
        self.room = min(MAX_SAMPLES, max(MIN_SAMPLES, ALL_SAMPLES // num_ranks))
        """Samples that are kept of a rank."""
        self._interval = INTERVAL
        self._due = launched + FIRST_AFTER
        self._last: dict[int, tuple[int, float, int]] = {}
        """By rank: process, time and processor time at the last sample."""

    def next_due(self, now: float) -> float:
        """Return the seconds until `tick` has something to do."""
        return max(0.0, self._due - now)

    def tick(self, now: float, tree: Tree, gpus: GpuMeter) -> None:
        """Take a sample of each rank that is up, if it is time. `now` is a time of `time.monotonic()`."""
        if now < self._due:
            return
        pids = tree.pids
        for rank, pulse in tree.pulses(pids).items():
            load = self._load(rank, pids[rank], now, pulse.ticks)
            gpu = gpus.read(rank)
            old = self.usage.get(rank, RankUsage())
            self.usage[rank] = RankUsage(
                times=(*old.times, now - self._launched),
                memory=(*old.memory, tree.memory(rank)),
                load=(*old.load, load),
                gpu_memory=(*old.gpu_memory, gpu.memory),
                gpu_utilization=(*old.gpu_utilization, gpu.utilization),
            )
        if any(len(usage.times) > self.room for usage in self.usage.values()):
            self.usage = {rank: halve(usage) for rank, usage in self.usage.items()}
            self._interval *= 2
        self._due = now + self._interval

    def forget(self, first: int) -> None:
        """Drop the samples of ranks from this one on, which do not come back."""
        self.usage = {rank: usage for rank, usage in self.usage.items() if rank < first}

    def _load(self, rank: int, pid: int, now: float, ticks: int) -> float | None:
        last_pid, since, ticks_then = self._last.get(rank, (None, 0.0, 0))
        self._last[rank] = (pid, now, ticks)
        return (ticks - ticks_then) / TICKS_PER_SECOND / (now - since) if pid == last_pid else None


def halve(usage: RankUsage) -> RankUsage:
    """Return half as many samples: of each two the later time, the most memory and the mean load."""

    def peaks(column: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return tuple(max((value for value in pair if value is not None), default=None) for pair in _pairs(column))

    def means(column: tuple[float | None, ...]) -> tuple[float | None, ...]:
        known = ([value for value in pair if value is not None] for pair in _pairs(column))
        return tuple(sum(values) / len(values) if values else None for values in known)

    return RankUsage(
        times=tuple(pair[-1] for pair in _pairs(usage.times)),
        memory=peaks(usage.memory),
        load=means(usage.load),
        gpu_memory=peaks(usage.gpu_memory),
        gpu_utilization=means(usage.gpu_utilization),
    )


def _pairs(column: tuple[T, ...]) -> list[tuple[T, ...]]:
    return [column[at : at + 2] for at in range(0, len(column), 2)]


# --------------------------------------------------------------------------------------------------------------------
# Memory and utilization of the GPUs of a run's ranks.


GPU_INTERVAL = 1.0
"""Seconds for which a reading is used: NVML does not update a GPU's utilisation more often."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment; None: unknown."""

    memory: int | None = None
    """Bytes that all processes together use."""
    utilization: float | None = None
    """0 to 1."""


class GpuMeter:
    """Reads the GPUs of one run when asked, at most once a second; from any thread.

    NVML stays open from the first reading to `close`, because opening it may take longer than all readings together.
    `gpus`: NVML indices or UUIDs, in the order in which the ranks take them.
    """

    def __init__(self, gpus: Sequence[int | str]) -> None:
        self._gpus = tuple(gpus)
        self._lock = threading.Lock()
        self._library: devices.Library | None = None
        self._is_closed = not gpus
        """True if there is nothing more to read."""
        self._looked_at = float("-inf")
        """Time of the last reading, by `time.monotonic()`."""
        self._readings: dict[int | str, GpuReading] = {}
        """By NVML index or UUID: the last reading; after `close` the peak memory."""
        self._peaks: dict[int | str, int] = {}
        """By NVML index or UUID: the most memory that was read, in bytes."""

    def read(self, rank: int) -> GpuReading:
        """Return the latest reading of a rank's GPU; once the meter is closed, the peak memory."""
        if not self._gpus:
            return GpuReading()
        with self._lock:
            now = time.monotonic()
            if not self._is_closed and now - self._looked_at >= GPU_INTERVAL:
                self._looked_at = now
                self._look()
            return self._readings.get(self._gpus[rank % len(self._gpus)], GpuReading())

    def close(self) -> None:
        """Close NVML; idempotent."""
        with self._lock:
            self._is_closed = True
            library, self._library = self._library, None
            self._readings = {gpu: GpuReading(memory) for gpu, memory in self._peaks.items()}
        if library is not None:
            with contextlib.suppress(OSError):
                library.close()

    def _look(self) -> None:
        try:
            self._library = self._library or devices.Library()
            for gpu in set(self._gpus):
                self._readings[gpu] = self._read(self._library, gpu)
                self._peaks[gpu] = max(self._readings[gpu].memory or 0, self._peaks.get(gpu, 0))
        except OSError:
            self._is_closed = True  # NVML worked when the run was planned. A run must not fail without it.

    def _read(self, library: devices.Library, gpu: int | str) -> GpuReading:
        try:
            memory = library.memory(gpu)
            return GpuReading(None if memory is None else memory[2], library.utilization(gpu))
        except devices.Unusable:  # The driver has lost the GPU since.
            return GpuReading()


# --------------------------------------------------------------------------------------------------------------------
# Rates at which a rank's counts grow: over the last seconds, and over the whole run.


RATE_SECONDS = 5.0
"""Seconds over which a rate is measured."""
LOOP_SECONDS = 1.0
"""Seconds after which a loop's own rate is known; a shorter one is measured together with those before it."""


class Pace:
    """Rate at which a count grows. Time in which it does not grow counts, too."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        self._loop: object = None
        self._loop_since = 0.0
        """The loop that is counted now, and its first mark."""
        self._first: tuple[float, float] | None = None
        self._grown: tuple[float, float] | None = None
        """The first mark, and the last one at which the count had grown: what comes after the work does not count."""

    def note(self, time: float, count: float, loop: object = None) -> None:
        """Note the count of items so far, in all loops; `loop` is anything that stays equal during one loop."""
        if loop != self._loop:
            self._loop, self._loop_since = loop, time
        if self._first is None:
            self._first = time, count
        elif count > self._marks[-1][1]:
            self._grown = time, count
        if self._marks and count < self._marks[-1][1]:
            self._marks.clear()  # Another process counts from 0.
        self._marks.append((time, count))
        while len(self._marks) > 2 and time - self._marks[1][0] > RATE_SECONDS:
            self._marks.popleft()

    def leave_out(self, since: float, until: float) -> None:
        """Leave out a pause: what was noted before it moves to its end."""

        def move(mark: tuple[float, float]) -> tuple[float, float]:
            time, count = mark
            return (time + until - since if time <= since else time), count

        self._marks = deque(map(move, self._marks))
        self._first = None if self._first is None else move(self._first)
        self._grown = None if self._grown is None else move(self._grown)
        self._loop_since, _ = move((self._loop_since, 0.0))

    def rate(self) -> float | None:
        """Return the growth per second over the last seconds; None if it is not known."""
        marks = list(self._marks)
        if not marks:
            return None
        if marks[-1][0] - self._loop_since >= LOOP_SECONDS:
            marks = [mark for mark in marks if mark[0] >= self._loop_since]
        return _growth(marks[0], marks[-1])

    def mean(self) -> float | None:
        """Return the growth per second from the first mark to the last growth; None if it is not known."""
        return None if self._first is None or self._grown is None else _growth(self._first, self._grown)


def _growth(first: tuple[float, float], last: tuple[float, float]) -> float | None:
    seconds = last[0] - first[0]
    return (last[1] - first[1]) / seconds if seconds > 0 else None


# --------------------------------------------------------------------------------------------------------------------
# Rate at which the samples of a run are trained on, as one rank's Accelerator counts them.


Spans = tuple[tuple[str, float, float], ...]


class SamplePace(Pace):
    """The pace of one rank's samples, measured over elapsed time."""

    def __init__(self) -> None:
        super().__init__()
        self._num_samples = 0.0

    def add(self, time: float, num_samples: float, spans: Spans, since: float, offset: float = 0.0) -> None:
        """Add the samples of one record of phases, whose `spans` and `since` are by the clock of the rank's machine.

        The clock of this machine, by which `time` is, is ahead of that one by `offset` seconds.
        """
        end = time
        if spans:
            (_, start, _), (_, last, seconds) = spans[0], spans[-1]
            end = last + seconds + offset  # A rank sends the last record at the end of its function.
            if self._first is None:
                self.note(min(start, since) + offset, 0.0)
        self._num_samples += num_samples
        self.note(end, self._num_samples)
