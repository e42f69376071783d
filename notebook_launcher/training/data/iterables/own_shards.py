"""Streams of Hugging Face `datasets`: every rank reads its own shards instead of the whole stream."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.data.iterables.iterable import IterableDatasetShard, StreamRound
from notebook_launcher.training.data.rounds import Round

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OwnShards", "is_split_by_node", "shards_of_rank"]


def shards_of_rank(dataset: Any, num_processes: int, process_index: int) -> Any:
    """Return the part of a streamed data set that this rank reads; None if every rank must read everything.

    Raises:
        ValueError: The data set was split by the user, and not for this rank of these ranks.
    """
    if is_split_by_node(dataset):
        split = dataset._distributed  # noqa: SLF001 - the library has no public name for it
        if (split.world_size, split.rank) != (num_processes, process_index):
            raise ValueError(
                f"prepare() got a data set that was split for rank {split.rank} of {split.world_size}, and this is "
                f"rank {process_index} of {num_processes}: a share of a share would miss samples. Leave out "
                "split_dataset_by_node; prepare() shares out."
            )
        return dataset
    if not _is_stream(dataset) or not hasattr(dataset, "shard") or dataset.n_shards < num_processes:
        return None
    return dataset.shard(num_shards=num_processes, index=process_index)


def is_split_by_node(dataset: Any) -> bool:
    """Return True if the user called `datasets.distributed.split_dataset_by_node`."""
    return _is_stream(dataset) and getattr(dataset, "_distributed", None) is not None


def _is_stream(dataset: Any) -> bool:
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


class OwnShards(IterableDatasetShard):
    """The elements that one rank reads of a data set, while other ranks read others.

    A rank that reads cannot know what the others have; see `InStep`. With `even_batches` its own last batch is filled
    with elements from its start.
    """

    def __len__(self) -> int:
        raise TypeError(
            "len(): the number of elements in a rank's shards is known only at their end. Count the batches in the "
            "loop, or give a progress bar the number yourself: tqdm(loader, total=...)."
        )

    def check(self) -> None:
        """Do nothing, because lengths are not known."""

    def rounds(self, skip: int = 0) -> Iterator[StreamRound]:
        """Yield this rank's elements, batch by batch; first of all an empty batch. Rounds count this rank alone.

        Args:
            skip: Number of consumed elements; they are read when the empty batch is asked for.
        """
        stream, size = iter(self.dataset), self.per_rank
        start = list(itertools.islice(stream, min(skip, size)))
        skip = len(start) + sum(1 for _ in itertools.islice(stream, skip - len(start)))
        yield StreamRound([], None, skip)
        while current := list(itertools.islice(stream, size)):
            missing = size - len(current)
            if missing and self.drop_last:
                return
            skip += len(current)
            start = start or current
            real = self._counts([current])
            if missing and self.even_batches:
                current += itertools.islice(itertools.cycle(start), missing)
            rows = self._counts([current])
            yield StreamRound(current, Round(rows, real, rows if self.even_batches else real), skip)
