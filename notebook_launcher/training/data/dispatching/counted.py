"""Batches with the number of their samples, which rank 0 deals out to all ranks.

A `collate_fn` may return anything: a list of its samples, tuples of images of different sizes, tensors of packed texts.
So samples are counted where they are still apart, in the process that collates them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import default_collate

from notebook_launcher.training.data.rows import (
    count_rows,
    find_row_lists,
    find_rows,
    is_list_of_samples,
    take_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CountedBatch", "CountingCollate", "counted", "counted_ready", "ready_rows"]


class CountedBatch(NamedTuple):
    """A batch with the number of its samples."""

    batch: Any
    rows: int
    can_be_cut: bool
    """True if every part of the batch has a row for each sample, or belongs to the batch as a whole."""
    lists: frozenset[str] = frozenset()
    """The paths of lists with an item for each sample, of whatever kind."""

    def take(self, start: int, stop: int) -> Any:
        """Return the samples from `start` to `stop`; raise TypeError if the batch cannot be cut."""
        if (start, stop) == (0, self.rows):
            return self.batch
        if not self.can_be_cut:
            raise TypeError(
                f"A batch of {self.rows} samples cannot be cut into parts for the ranks: collate_fn made a "
                f"{type(self.batch).__name__} of which not every part has a row for each sample. Pass "
                "slice_fn_for_dispatch=, or dispatch_batches=False so that every rank reads the data itself."
            )
        return take_rows(self.batch, start, stop, self.rows, self.lists)


def counted(batch: Any) -> CountedBatch:
    """Return a batch of torch's own `collate_fn` with its rows, unless it has been counted already."""
    if isinstance(batch, CountedBatch):
        return batch
    return CountedBatch(batch, count_rows(batch), can_be_cut=find_rows(batch) is not None)


def ready_rows(batch: Any) -> int:
    """Return the number of samples of a batch that the data set made ready."""
    return len(batch) if is_list_of_samples(batch) else count_rows(batch)


def counted_ready(batch: Any) -> CountedBatch:
    """Return a batch that the data set made ready with its rows."""
    if is_list_of_samples(batch):
        return CountedBatch(batch, len(batch), can_be_cut=False)
    rows = find_rows(batch)
    return counted(batch) if rows is None else CountedBatch(batch, rows, True, find_row_lists(batch, rows).paths)


class ReadyCount:
    """A `collate_fn` for batches that the data set makes ready."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, ready: Any) -> CountedBatch:
        """Convert the batch."""
        return counted_ready(self._collate_fn(ready))


class CountingCollate:
    """A `collate_fn` that counts the samples that it gets."""

    def __init__(self, collate_fn: Callable[[Sequence[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    @classmethod
    def around(cls, collate_fn: Any, *, is_ready: bool) -> Any:
        """Return a counting `collate_fn`.

        Args:
            collate_fn: Torch's own stays, because each of its samples is a row.
            is_ready: True if the data set makes the batches ready (`batch_size=None`).
        """
        if is_ready:
            return ReadyCount(collate_fn)
        return collate_fn if collate_fn is default_collate else cls(collate_fn)

    def __call__(self, samples: Sequence[Any]) -> CountedBatch:
        """Collate the samples."""
        batch = self._collate_fn(samples)
        lists = find_row_lists(batch, len(samples), samples)
        return CountedBatch(batch, len(samples), can_be_cut=lists.fits, lists=lists.paths)
