"""Cost of the ranks' waiting for each other, and time saved by accumulating gradients, from measured spans."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.wording.units import format_seconds, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from notebook_launcher.history.schema import RankPhases, RunSnapshot

__all__ = ["SyncCost", "measure_sync", "slowest_rank"]

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
