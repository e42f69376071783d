"""A batch sampler without its first batches."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler

from notebook_launcher.training.data.sampling.shares import Share, Stretch, shares_in, stretches_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SkipBatchSampler"]


class SkipBatchSampler(BatchSampler):
    """A batch sampler that skips the first `skip_batches` batches of another sampler in every iteration."""

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
        """Yield the remaining batches, with their rounds; see `stretches`."""
        return shares_in(self.stretches(skip))

    def stretches(self, skip: int = 0) -> Iterator[Stretch]:
        """Yield the remaining batches, with their rounds.

        Args:
            skip: Number of samples of the epoch that were consumed; if any, the first batches are among them.
        """
        left_out = 0 if skip else self.skip_batches
        for stretch in stretches_of(self.batch_sampler, skip):
            batches, drawn, samples = stretch
            if left_out < len(batches):
                yield (
                    stretch
                    if not left_out
                    else Stretch(batches[left_out:], drawn, samples + left_out * sum(drawn.real))
                )
            left_out = max(0, left_out - len(batches))
