"""Memory and load of a run's ranks over time, read from outside, without any work of the ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from notebook_launcher.history.schema import RankUsage

if TYPE_CHECKING:
    from notebook_launcher.engines.tree import Tree
    from notebook_launcher.kernel.metering.gpu_meter import GpuMeter

__all__ = ["UsageMeter", "halve"]

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
    """Samples the memory and the load of one run's ranks; the run's thread drives it, any thread may read `usage`.

    Args:
        launched: Time of the launch, by `time.monotonic()`.
        num_ranks: Number of ranks.
    """

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
    return RankUsage(
        times=tuple(pair[-1] for pair in _pairs(usage.times)),
        memory=_peaks(usage.memory),
        load=_means(usage.load),
        gpu_memory=_peaks(usage.gpu_memory),
        gpu_utilization=_means(usage.gpu_utilization),
    )


def _pairs(column: tuple[T, ...]) -> list[tuple[T, ...]]:
    return [column[at : at + 2] for at in range(0, len(column), 2)]


def _peaks(column: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return tuple(max((value for value in pair if value is not None), default=None) for pair in _pairs(column))


def _means(column: tuple[float | None, ...]) -> tuple[float | None, ...]:
    known = ([value for value in pair if value is not None] for pair in _pairs(column))
    return tuple(sum(values) / len(values) if values else None for values in known)
