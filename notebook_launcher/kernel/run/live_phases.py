"""Time that each rank of a run has spent on each phase of training."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from notebook_launcher.history.schema import MAX_SPANS
from notebook_launcher.kernel.run.phase_sums import PhaseSums

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.engines.live_records import Packed
    from notebook_launcher.history.schema import RankPhases

__all__ = ["LivePhases"]

ALL_SPANS = 131_072
"""Spans of phases that are kept of all ranks together: 15 MB. Each rank has an equal part, MAX_SPANS at most."""
MIN_SPANS = 64


class LivePhases:
    """The phases of all ranks of one run. Thread-safe.

    Args:
        launched: Time of the launch, from which spans are counted.
        num_ranks: Number of ranks that share the spans.
    """

    def __init__(self, launched: float, num_ranks: int) -> None:
        self._sums: dict[int, PhaseSums] = {}
        self._lock = threading.Lock()
        """Held while phases are added or read."""
        self._launched = launched
        self._max_spans = min(MAX_SPANS, max(MIN_SPANS, ALL_SPANS // num_ranks))

    def add(self, rank: int, packed: Packed, offset: float) -> None:
        """Add a packed record of a rank; `offset`: seconds by which this machine's clock is ahead of the rank's."""
        with self._lock:
            if (sums := self._sums.get(rank)) is None:
                sums = self._sums[rank] = PhaseSums(self._launched, self._max_spans)
            sums.add(packed, offset)

    def read(self) -> dict[int, RankPhases]:
        """Return the sums by rank."""
        with self._lock:
            return {rank: sums.read() for rank, sums in self._sums.items()}

    def forget(self, ranks: Iterable[int]) -> None:
        """Drop the sums of ranks that do not come back."""
        with self._lock:
            for rank in ranks:
                self._sums.pop(rank, None)
