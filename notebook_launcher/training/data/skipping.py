"""A batch sampler without its first batches."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from notebook_launcher.training.data.shares import Share, shares_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SkipBatchSampler"]


class SkipBatchSampler(BatchSampler):
    """A batch sampler that skips the first `skip_batches` batches of another one in every iteration."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def total_length(self) -> int:
        """Number of the other sampler's batches."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    def shares(self, skip: int = 0) -> Iterator[Share]:
        """Yield the remaining batches, with their rounds.

        Args:
            skip: How many samples of the epoch have been had; if any, the first batches are among them.
        """
        return itertools.islice(shares_of(self.batch_sampler, skip), 0 if skip else self.skip_batches, None)
