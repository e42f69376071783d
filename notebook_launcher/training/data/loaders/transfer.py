"""Transfer of batches to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import _profiler_enabled
from torch.utils.data.dataloader import _BaseDataLoaderIter

from notebook_launcher.training.operations import recursively_apply, send_to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.training.data.position import Position
    from notebook_launcher.training.data.rounds import Round

__all__ = ["Delivery", "copied_ahead", "move", "without_label"]


class Delivery(NamedTuple):
    """One rank's batch with its round and position."""

    batch: Any
    round: Round | None
    """The counts of all ranks' batches; None if unknown."""
    is_last: bool
    """True if the batch is the loop's last."""
    position: Position
    """The position in the epoch, with this batch."""


def without_label(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of torch's iterator, without the label for a profiler where none listens.

    The label of `DataLoader` takes 6.5 of the 7 µs that its iterator adds to a batch. Iterators with a `__next__` of
    their own (torchdata's StatefulDataLoader counts in it) are read as they are.
    """
    read = getattr(batches, "_next_data", None)
    if read is None or type(batches).__next__ is not _BaseDataLoaderIter.__next__:
        yield from batches
        return
    while True:
        try:
            batch = next(batches) if _profiler_enabled() else read()
        except StopIteration:
            return
        yield batch


def move(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Return the batch on the device; itself if it is a list or tuple of tensors that are there."""
    if device.type == "cpu" and type(batch) in (list, tuple):
        for part in batch:
            if type(part) is not torch.Tensor or not part.is_cpu:
                break
        else:
            return batch
    return send_to_device(batch, device, non_blocking=non_blocking)


def copied_ahead(deliveries: Iterable[Delivery], device: torch.device) -> Iterator[Delivery]:
    """Copy each batch to a CUDA device, from pinned memory, while the batch before is computed on."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ready: tuple[Delivery, torch.cuda.Event] | None = None
    for batch, drawn, is_last, position in deliveries:
        pinned = recursively_apply(_pin, batch)
        # Work that is queued by now may still use memory of a freed batch; the copy must wait for it.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            moved = send_to_device(pinned, device, non_blocking=True)
            copied = Delivery(moved, drawn, is_last, position), stream.record_event()
        if ready is not None:
            yield _received(*ready, device)
        ready = copied
    if ready is not None:
        yield _received(*ready, device)


def _received(delivery: Delivery, copied: torch.cuda.Event, device: torch.device) -> Delivery:
    torch.cuda.current_stream(device).wait_event(copied)
    return delivery


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor
