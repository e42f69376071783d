"""Rounds, which are the batches that all ranks get at once."""

from __future__ import annotations

import dataclasses

__all__ = ["Round"]


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One round: every rank's batch, counted in samples, in rank order."""

    rows: tuple[int, ...]
    """Samples in each rank's batch, also samples that were added to even it out."""
    real: tuple[int, ...]
    """Samples of each batch that no rank has had before; they come first, and `gather_for_metrics` keeps them."""
    weights: tuple[int, ...]
    """The batch's weight in a window's mean: `rows`, or 0 for a batch that only keeps step."""

    def spread(self, copies: int) -> Round:
        """Return the round in which `copies` neighbouring ranks have the same batch, real on the first of them."""
        rows = tuple(count for count in self.rows for _ in range(copies))
        real = tuple(count if copy == 0 else 0 for count in self.real for copy in range(copies))
        return Round(rows, real, tuple(weight for weight in self.weights for _ in range(copies)))
