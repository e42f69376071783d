"""Streams of which every rank reads its own shards, and streams that would leave out others' shards.

Hugging Face's `datasets`, and data sets that were made for one rank, are read by every rank. Others find out the rank
when they are read, as WebDataset's `split_by_node` does. Where a rank reads for all, such a data set is told that there
is but one rank: it gives all samples, and the loader shares them out.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher.training.data.iterables.iterable import IterableDatasetShard, StreamRound
from notebook_launcher.training.data.rounds import Round

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["OnlyRankInWorker", "OwnShards", "is_share", "open_as_only_rank", "shards_of_rank"]

NAMES = (
    ("rank", "world_size"),
    ("rank", "num_replicas"),
    ("global_rank", "world_size"),
    ("process_index", "num_processes"),
    ("dp_rank", "dp_world_size"),
)
"""Attributes by which a data set shows that it was made for one of several ranks."""
ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def shards_of_rank(dataset: Any, num_processes: int, process_index: int) -> Any:
    """Return the part of a streamed data set that this rank reads; None if every rank must read everything.

    Raises:
        ValueError: The data set was split by the user, and not for this rank of these ranks.
    """
    if (split := _split_of(dataset)) is not None:
        if split != (process_index, num_processes):
            raise ValueError(
                f"prepare() got a data set that was split for rank {split[0]} of {split[1]}, and this is "
                f"rank {process_index} of {num_processes}: a share of a share would miss samples. Leave out "
                "split_dataset_by_node, or whatever splits it; prepare() shares out."
            )
        return dataset
    if not _is_stream(dataset) or not hasattr(dataset, "shard") or dataset.n_shards < num_processes:
        return None
    return dataset.shard(num_shards=num_processes, index=process_index)


def is_share(dataset: Any) -> bool:
    """Return True for a stream that was made for one rank: by `split_dataset_by_node`, or with a `rank` of its own."""
    return _split_of(dataset) is not None


def _split_of(dataset: Any) -> tuple[int, int] | None:
    """Return the rank, and the number of ranks, for which a stream was made; None if it was made for all."""
    if _is_stream(dataset):
        split = getattr(dataset, "_distributed", None)
        return None if split is None else (split.rank, split.world_size)
    held = {name.lstrip("_"): value for name, value in getattr(dataset, "__dict__", {}).items() if type(value) is int}
    pairs = ((held[rank], held[size]) for rank, size in NAMES if rank in held and size in held)
    return next(((rank, size) for rank, size in pairs if 0 <= rank < size > 1), None)


def open_as_only_rank(open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Open a loader without workers, and return what it fetches; whatever asks meanwhile is told: rank 0 of 1 reads."""
    restore = _pose_as_only_rank()
    try:
        fetched = open_loader()
    finally:
        restore()
    return _read_as_only_rank(fetched)


def _read_as_only_rank(fetched: Iterator[Any]) -> Iterator[Any]:
    while True:
        restore = _pose_as_only_rank()
        try:
            batch = next(fetched)
        except StopIteration:
            return
        finally:
            restore()
        yield batch


class OnlyRankInWorker:
    """A `worker_init_fn` for a worker that reads for all ranks: whatever asks there is told that rank 0 of 1 reads."""

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker, for as long as it lives."""
        _pose_as_only_rank()
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def _pose_as_only_rank() -> Callable[[], None]:
    """Tell whatever asks in this thread that rank 0 of 1 reads, and return the function that ends that."""
    thread = threading.get_ident()

    def replaced(ask: Callable[..., int], answer: int) -> Callable[..., int]:
        def answered(group: Any = None) -> int:
            is_meant = threading.get_ident() == thread and (group is None or group is dist.group.WORLD)
            return answer if is_meant else ask(group)

        return answered

    def restore() -> None:
        os.environ.update(variables)
        for name, ask in functions.items():
            setattr(dist, name, ask)

    variables = {name: os.environ[name] for name in ONLY_RANK if name in os.environ}
    functions = {name: getattr(dist, name) for name in ("get_rank", "get_world_size")}
    os.environ.update({name: ONLY_RANK[name] for name in variables})
    for (name, ask), answer in zip(functions.items(), (0, 1), strict=True):
        setattr(dist, name, replaced(ask, answer))
    return restore


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
