"""Progress of a run: the progress of all its ranks, merged, and as one line of text."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from notebook_launcher.wording.text import one_line
from notebook_launcher.wording.units import format_count, format_number, format_rate, format_seconds, format_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.history.schema import RankSnapshot

__all__ = ["MergedProgress", "merge_progress", "progress_line"]

MAX_DESCRIPTION = 24
"""Characters of a loop's description in the line, so that the numbers behind it fit into a terminal, too."""
MAX_METRICS = 3
"""Metrics in the line: it should fit into a terminal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MergedProgress:
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
    return MergedProgress(
        rank=slowest.rank,
        done=slowest.done,
        total=slowest.total,
        rate=slowest.rate,
        description=slowest.description,
    )


def _epoch_of(description: str) -> int | None:
    """Return the epoch after which a loop is named; None if it is not."""
    found = re.match(r"epoch (\d+)", description, re.IGNORECASE)
    return int(found[1]) if found else None


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
        parts += _values(slowest.metrics)
    parts += _settled(ranks) if parts else []
    return _one_line(f"{name}: {', '.join(parts)}") if parts else ""


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


def _values(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {format_number(value)}" for name, value in list(metrics.items())[:MAX_METRICS]]


def _one_line(text: str) -> str:
    """Return the text without characters that move a terminal's cursor, because names come from the user."""
    return "".join(char if char.isprintable() else " " for char in text)
