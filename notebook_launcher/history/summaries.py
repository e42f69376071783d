"""Progress of a run: the progress of all its ranks, merged, and as one line of text."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, NamedTuple

from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint
from notebook_launcher.wording import (
    WHOLE_RUN,
    format_count,
    format_number,
    format_rate,
    format_seconds,
    format_share,
    one_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from notebook_launcher.history.schema import RankPhases, RankSnapshot, RankUsage, RunSnapshot


MAX_DESCRIPTION = 24
"""Characters of a loop's description in the line, so that the numbers behind it fit into a terminal, too."""
MAX_LINE = 400
MAX_METRICS = 3
"""Metrics in the line: it should fit into a terminal."""


class MergedProgress(NamedTuple):
    """Progress of the rank that is furthest behind; the run is not done before this rank is."""

    rank: int
    done: int
    total: int | None
    rate: float | None
    """Items per second, over the last seconds."""
    description: str

    @property
    def share(self) -> float | None:
        """Part of the items that is done, 0 to 1; None if the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the remaining items are done, at this rate; None if none remain, or an input is unknown."""
        if self.total is None or not self.rate or self.done >= self.total:
            return None
        return (self.total - self.done) / self.rate

    @property
    def left(self) -> str:
        """The words behind the seconds: a loop that is named after its epoch is not the whole run."""
        return "left" if _epoch_of(self.description) is None else "left in this epoch"


def merge_progress(ranks: Sequence[RankSnapshot]) -> MergedProgress | None:
    """Return the progress of the rank that is furthest behind; None if no rank has reported progress."""
    counting = [rank for rank in ranks if rank.done is not None]
    if not counting:
        return None
    have_totals = all(rank.total for rank in counting)
    epochs = {rank.rank: _epoch_of(rank.description) for rank in counting}
    have_epochs = None not in epochs.values()

    def position(rank: RankSnapshot) -> tuple[int, float]:
        assert rank.done is not None
        epoch = (epochs[rank.rank] or 0) if have_epochs else 0
        return epoch, rank.done / rank.total if have_totals and rank.total else rank.done

    slowest = min(counting, key=position)
    assert slowest.done is not None
    return MergedProgress(slowest.rank, slowest.done, slowest.total, slowest.rate, slowest.description)


def _epoch_of(description: str) -> int | None:
    """Return the epoch after which a loop is named; None if it is not."""
    found = re.match(r"epoch (\d+)", description, re.IGNORECASE)
    return int(found[1]) if found else None


_LENGTH = re.compile(
    r"(?<!\w)(?:(?:num|n|max|total|num_train)_)?(epochs|steps|updates|iterations)['\"]?(?:=|: )(\d+)(?![\w.])"
)
"""An argument or a setting that says how long the training is: `epochs=3`, `'max_steps': 1000`."""
_BAR = re.compile(r"\| *(\d+)/(\d+) \[[\d:]+<")
"""A bar of tqdm: what is done, and all."""
LEAST_SEEN = 2.0
"""Seconds of a training after which its pace tells when it ends."""


class TimeLeft:
    """Finds out from one snapshot after another when a run is likely to end."""

    def __init__(self) -> None:
        self._first: tuple[float, float, int] | None = None
        """The first known part of the run that was done, its time in seconds since the launch, and the restarts."""
        self._share = 0.0
        """The largest known part: while a loop over other data goes on, as in an evaluation, the part is not known."""
        self._seen = 0.0

    def read(self, snapshot: RunSnapshot) -> float | None:
        """Return the seconds until the end at the mean pace so far; None if it is not known how long the run is."""
        share, seconds = share_done(snapshot), snapshot.seconds
        if snapshot.is_over or share is None:
            return None
        if self._first is None or self._first[2] != snapshot.restarts:
            self._first, self._share = (share, seconds, snapshot.restarts), share
        first, began, restarts = self._first
        if snapshot.state == "paused":  # It takes none of the training's time.
            began += seconds - self._seen
            self._first = (first, began, restarts)
        self._share, self._seen = max(self._share, share), seconds
        if seconds - began < LEAST_SEEN or self._share <= first:
            return None
        return (1 - self._share) * (seconds - began) / (self._share - first)


def share_done(snapshot: RunSnapshot) -> float | None:
    """Return the part of a run that the rank furthest behind has done, 0 to 1; None if it is not known.

    An argument or a tunable setting with a name such as `epochs` or `max_steps` tells how long the run is. What is done
    is counted by a loop over a prepared loader, by `track`, by a bar of tqdm that is printed, or by the steps. What
    `report(total_steps=)` tells comes first.
    """
    words = [f"{name}={text}" for name, text in snapshot.arguments.items()]
    words += [f"{setting.name}={setting.value:.0f}" for setting in snapshot.settings if setting.value is not None]
    found = [(name == "epochs", int(number)) for name, number in _LENGTH.findall("\n".join(words))]
    # Two numbers, as of a teacher and a student, do not tell.
    epochs, steps = ({number for kind, number in found if kind is wanted and number} for wanted in (True, False))
    whole = {number for numbers in (epochs, steps) if len(numbers) == 1 for number in numbers}
    merged = merge_progress(snapshot.ranks)
    if merged is not None and merged.share is not None:
        epoch = _epoch_of(merged.description)
        if epoch is not None and len(epochs) == 1 and epoch < min(epochs):
            return (epoch + merged.share) / min(epochs)
        if epoch is None and (merged.total in whole or merged.description == WHOLE_RUN):
            return merged.share
    bars = [bar for rank in snapshot.ranks if (bar := _BAR.search(rank.last_line)) and int(bar[2]) in whole]
    if bars:
        return min(1.0, *(int(each[1]) / int(each[2]) for each in bars))
    counted = [rank.step for rank in snapshot.ranks if rank.step is not None]
    if len(steps) == 1 and counted and min(counted) <= min(steps):
        return min(counted) / min(steps)
    return None


def progress_line(name: str, ranks: Sequence[RankSnapshot]) -> str:
    """Return `train: 35.3 % 120/340, 12.1 it/s, 18 s left, loss 0.31`; empty if no rank has reported anything.

    Without a loop that counts, it has the step and the samples per second. Ranks that have ended, or that have waited
    for long in a collective, are counted at the end: `1 of 4 ranks done`.
    """
    merged = merge_progress(ranks)
    parts = _describe(merged) if merged is not None else []
    slowest = next((rank for rank in ranks if merged is None or rank.rank == merged.rank), None)
    if slowest is not None:
        if merged is None and slowest.step is not None and (slowest.metrics or slowest.samples_per_second):
            parts.append(f"step {slowest.step:,}")
        if merged is None and slowest.samples_per_second:
            parts.append(f"{format_number(slowest.samples_per_second, 3)} samples/s")
        parts += [f"{name} {format_number(value)}" for name, value in list(slowest.metrics.items())[:MAX_METRICS]]
    parts += _settled(ranks) if parts else []
    return one_line(f"{name}: {', '.join(parts)}", MAX_LINE) if parts else ""  # Names come from the user.


def _describe(merged: MergedProgress) -> list[str]:
    parts = [one_line(merged.description, MAX_DESCRIPTION)] if merged.description else []
    if merged.share is None:
        parts.append(format_count(merged.done))
    else:
        parts.append(f"{format_share(merged.share)} {format_count(merged.done)}/{format_count(merged.total)}")
    if merged.rate:
        parts.append(format_rate(merged.rate))
    if merged.seconds_left is not None:
        parts.append(f"{format_seconds(math.ceil(merged.seconds_left))} {merged.left}")
    return parts


def _settled(ranks: Sequence[RankSnapshot]) -> list[str]:
    """Return how many ranks do something else than the others; a run of one rank needs no such words."""
    counts = {
        "done": sum(rank.state == "returned" for rank in ranks),
        "failed": sum(rank.state == "failed" for rank in ranks),
        "waiting": sum(rank.waited is not None for rank in ranks),
    }
    return [f"{count} of {len(ranks)} ranks {word}" for word, count in counts.items() if count and len(ranks) > 1]


# --------------------------------------------------------------------------------------------------------------------
# Cost of the ranks' waiting for each other, and time saved by accumulating gradients, from measured spans.


NOTABLE = 0.05
"""Smallest difference between two ranks' shares of waiting for one of them to count as slower."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """Cost of synchronising, on average over the ranks that measured it."""

    share: float | None
    """Part of the time in the measured phases, not of the elapsed time, in which a rank waited for others, 0 to 1."""
    mean_seconds: float | None
    """Seconds of one synchronisation; None if none was measured."""
    saved_seconds: float | None
    """Seconds that a synchronisation after each of the other micro-batches would have taken; None if none was
    measured."""
    num_ranks: int = 0
    """Ranks that have reported phases."""

    @property
    def text(self) -> str:
        """The cost in one or two sentences."""
        if self.num_ranks == 1 and self.mean_seconds is None:
            return ""  # There is nobody to wait for.
        if self.share is None:
            return "Not measured: no Accelerator has reported a window yet."
        if self.mean_seconds is None or self.saved_seconds is None:
            return "Not measured: no rank has synchronised with another."
        waits = (
            f"{format_share(self.share)} of the time of the steps was spent waiting for other ranks "
            f"({format_seconds(self.mean_seconds)} per wait)."
        )
        if not self.saved_seconds:
            return f"{waits} Every micro-batch is synchronised."
        return f"{waits} Accumulation saved {format_seconds(self.saved_seconds)}."


def measure_sync(phases: Iterable[RankPhases]) -> SyncCost:
    """Return the cost of synchronising: a rank saves its mean synchronisation for each one that it could skip."""
    measured = [rank for rank in phases if sum(rank.seconds.values())]
    if not measured:
        return SyncCost(share=None, mean_seconds=None, saved_seconds=None)
    share = sum(rank.seconds.get("sync", 0.0) for rank in measured) / sum(
        sum(rank.seconds.values()) for rank in measured
    )
    synced = [rank for rank in measured if rank.counts.get("sync")]
    if not synced:
        return SyncCost(share=share, mean_seconds=None, saved_seconds=None, num_ranks=len(measured))
    total, count = sum(rank.seconds["sync"] for rank in synced), sum(rank.counts["sync"] for rank in synced)
    # A window is counted at its end, some microseconds after its synchronisation.
    saved = [
        rank.seconds["sync"] / rank.counts["sync"] * max(0, rank.micro_batches - max(rank.windows, rank.counts["sync"]))
        for rank in synced
    ]
    saving = sum(saved) / len(saved)
    return SyncCost(share=share, mean_seconds=total / count, saved_seconds=saving, num_ranks=len(measured))


def slowest_rank(snapshot: RunSnapshot) -> int | None:
    """Return the rank that the others wait for; None if no rank stands out.

    This is the rank whose loop is behind. If the loops of all ranks keep step, because the ranks wait for each other,
    it is the rank that waits clearly less than another rank.
    """
    done = {rank.rank: rank.done for rank in snapshot.ranks if rank.done is not None}
    # A rank that has begun the next epoch has done less of it, but is not behind.
    is_one_loop = len({rank.description for rank in snapshot.ranks if rank.done is not None}) == 1
    if is_one_loop and len(done) > 1 and max(done.values()) - min(done.values()) > 1 + 0.01 * max(done.values()):
        return min(done, key=lambda rank: done[rank])
    return _least_waiting(snapshot.phases)


def _least_waiting(phases: Mapping[int, RankPhases]) -> int | None:
    shares = {rank: own.shares.get("sync", 0.0) for rank, own in phases.items() if own.counts.get("sync")}
    if len(shares) < 2 or max(shares.values()) - min(shares.values()) < NOTABLE:
        return None
    return min(shares, key=lambda rank: shares[rank])


# --------------------------------------------------------------------------------------------------------------------
# Memory and load of a run's ranks as curves, so that every view draws them as it draws metrics.


FEWEST = 3
"""Samples of a rank from which a picture of them is drawn."""
CURVES = (
    ("memory, GB", "memory", 1e9),
    ("load, processors", "load", 1.0),
    ("GPU memory, GB", "gpu_memory", 1e9),
    ("GPU load, %", "gpu_utilization", 0.01),
)
"""Name of each curve, its column, and what one of its unit is in the unit of the column."""


def usage_points(usage: Mapping[int, RankUsage], after: Mapping[int, float] | None = None) -> Iterator[MetricPoint]:
    """Yield the samples as points of curves, each rank's in order.

    Args:
        usage: The samples by rank.
        after: By rank the time, in seconds since the launch, of the last sample that is left out.
    """
    for rank, samples in sorted(usage.items()):
        since = (after or {}).get(rank, -1.0)
        for at, time in enumerate(samples.times):
            if time > since:
                read = ((name, getattr(samples, column)[at], unit) for name, column, unit in CURVES)
                values = {name: value / unit for name, value, unit in read if value is not None}
                yield MetricPoint(rank=rank, step=round(time), time=time, values=values)


def usage_curves(usage: Mapping[int, RankUsage]) -> Curves:
    """Return memory and load as curves; empty if no rank has enough samples."""
    curves = Curves()
    if any(len(samples.times) >= FEWEST for samples in usage.values()):
        curves.fold(usage_points(usage))
    return curves


# --------------------------------------------------------------------------------------------------------------------
# The ranks' time by sampled stacks: a tree of calls for each rank, as plain data.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlameFrame:
    """A function that was found running, in the calls that led to it."""

    name: str
    """`train, line 12` for the user's code, else the function's name."""
    place: str
    """File and line; empty for a wait."""
    count: int
    """Samples in which the function, or one that it called, was found."""
    is_wait: bool = False
    """True for a collective in which the rank waited for other ranks."""
    is_library: bool = False
    """True for the code of Python or of an installed package."""
    children: tuple[FlameFrame, ...] = ()
    """Functions that it called, the most frequent first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flame:
    """The sampled calls of one rank."""

    rank: int
    num_samples: int
    frames: tuple[FlameFrame, ...] = ()
    """The outermost functions, the most frequent first."""

    @property
    def wait_share(self) -> float:
        """Part of the samples in which the rank waited in a collective, 0 to 1."""
        return sum(map(_count_waits, self.frames)) / self.num_samples if self.num_samples else 0.0


def _count_waits(frame: FlameFrame) -> int:
    return frame.count if frame.is_wait else sum(map(_count_waits, frame.children))
