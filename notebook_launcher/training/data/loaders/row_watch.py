"""The rows of batches beside the samples that a loader counts, where the two may differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, default_collate, default_convert

from notebook_launcher.training.data.dispatching.counted import ready_rows
from notebook_launcher.training.data.rows import find_rows
from notebook_launcher.wording.counts import plural

if TYPE_CHECKING:
    from notebook_launcher.training.data.rounds import Round

__all__ = ["RowWatch", "watch_rows"]


class RowWatch:
    """Looks at each batch of a loader whose batches may have other rows than its sampler has indices.

    With `batch_size=None` the data set makes the batches, and each index is one of them: their rows are the loader's
    `current_rows`. A `collate_fn` may join samples of several rows, or take a ready batch out of a list. Its rows may
    also be another dimension, such as time. So the loader's count stays, and rows that vary against it get a warning.
    """

    def __init__(self, loader: Any, place: int) -> None:
        self._loader = loader
        self._place = place
        self._first: tuple[int, int] | None = None
        """Rows and samples of the first batch."""

    def look(self, batch: Any, drawn: Round | None) -> None:
        """Look at the next batch of this rank."""
        loader = self._loader
        if loader.batch_sampler is None:
            loader.current_rows = ready_rows(batch)
        elif not loader.counts_otherwise and drawn is not None and self._place < len(drawn.rows):
            samples = drawn.rows[self._place]
            if not _lists_samples(batch, samples):
                self._compare(find_rows(batch), samples)

    def _compare(self, rows: int | None, samples: int) -> None:
        if rows is None or not samples:
            return
        first = self._first = self._first or (rows, samples)
        if rows * first[1] != first[0] * samples:
            self._loader.counts_otherwise = _describe(first, (rows, samples))


def watch_rows(loader: Any, place: int) -> RowWatch | None:
    """Return the watch of a prepared loader, for the rank of this place; None if each sample is a row of its batch."""
    if isinstance(loader.dataset, IterableDataset):
        return None  # Its elements are counted as they are read.
    is_plain = loader.batch_sampler is not None and loader.collate_fn in (default_collate, default_convert)
    return None if is_plain else RowWatch(loader, place)


def _lists_samples(batch: Any, samples: int) -> bool:
    """Return True if a batch is a list of samples, or has one of their parts, as `tuple(zip(*samples))` does."""
    if type(batch) is list and len(batch) == samples:
        return True
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return any(isinstance(part, (list, tuple)) and len(part) == samples for part in parts)


def _describe(*batches: tuple[int, int]) -> str:
    described = " and one with ".join(
        f"{plural(rows, 'row')} for {plural(number, 'sample')}" for rows, number in batches
    )
    return (
        f"collate_fn made a batch with {described}, and a micro-batch weighs as many samples as the loader counted. If "
        "the loss is a mean over the rows, pass weight=len(inputs) to backward. If it is a mean over the samples, "
        "all is well, and weight= with their number says so."
    )
