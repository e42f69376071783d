"""Streams of an iterable data set: batches with the place in the stream that they come from.

A stream is read in worker processes, where its end is seen first. So each element carries a receipt of its
round there, and the batch that is made of them brings the receipt to the process that trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.training.data.iterables.iterable import IterableDatasetShard
    from notebook_launcher.training.data.rounds import Round

__all__ = ["CollateWithReceipt", "Receipt", "StartWorker", "StreamWithReceipts"]


class Receipt(NamedTuple):
    """The origin of a batch."""

    round: Round | None
    """The round; None: every rank has a full batch."""
    stream: int
    """The worker whose stream the batch comes from; 0 without workers."""
    consumed: int
    """Number of elements of that stream up to and including the batch."""


class StreamWithReceipts(IterableDataset[Any]):
    """Yields `(element, Receipt)`; `(None, None)` for the elements of a batch to be dropped."""

    def __init__(self, shard: IterableDatasetShard, num_workers: int, *, persistent: bool) -> None:
        self.shard = shard
        # The epoch, the stream that was read last, and the number of samples read of each stream.
        self._orders = torch.zeros(2 + max(1, num_workers), dtype=torch.int64)
        if persistent:
            # Such workers get the data set once, and orders at every epoch.
            self._orders.share_memory_()  # type: ignore[no-untyped-call]

    def order(self, epoch: int, last_stream: int, consumed: Sequence[int]) -> None:
        """Set the place at which the next iteration begins."""
        wanted = [epoch, last_stream, *consumed]
        self._orders.zero_()
        self._orders[: len(wanted)] = torch.tensor(wanted)

    def __iter__(self) -> Iterator[tuple[Any, Receipt | None]]:
        worker = get_worker_info()
        stream = 0 if worker is None else worker.id
        epoch, last_stream, *consumed = self._orders.tolist()
        if worker is not None:
            self.shard.set_epoch(epoch)
        skip = consumed[stream]
        rounds = self.shard.rounds(skip)
        next(rounds)
        if skip and stream <= last_stream:
            # torch begins with worker 0. Workers before the one whose turn it is pass.
            yield from [(None, None)] * self.shard.per_rank
        for part in rounds:
            receipt = Receipt(part.round, stream, part.consumed)
            for element in part.elements:
                yield element, receipt


class CollateWithReceipt:
    """Collates elements that carry receipts into `(batch, Receipt)`; `(None, None)` passes through."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, batched: bool) -> None:
        self._collate_fn = collate_fn
        self._batched = batched

    def __call__(self, items: Any) -> tuple[Any, Receipt | None]:
        """Collate one batch; in a loader without `batch_size`, one element."""
        receipt = items[0][1] if self._batched else items[1]
        if receipt is None:
            return None, None
        elements = [element for element, _ in items] if self._batched else items[0]
        return self._collate_fn(elements), receipt


class StartWorker:
    """Calls the user's `worker_init_fn` in a worker that shows the user's data set as its own."""

    def __init__(self, worker_init_fn: Callable[[int], Any]) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker."""
        info = get_worker_info()
        assert info is not None
        # torch documents functions that change `get_worker_info().dataset`; that object itself refuses assignment.
        object.__setattr__(info, "dataset", info.dataset.shard.dataset)  # type: ignore[attr-defined]
        self._worker_init_fn(worker_id)
