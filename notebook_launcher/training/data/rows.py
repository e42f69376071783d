"""Rows of a collated batch, which are its samples: counting, taking, joining.

A sample is an element along dimension 0 of every tensor that is as long as the batch, and an item of every
list of plain objects that is as long (names, texts). Anything else belongs to the batch as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.operations import find_batch_size
from notebook_launcher.training.operations.nested import is_dataclass_instance, rebuild
from notebook_launcher.wording.text import type_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["count_rows", "find_rows", "fits_rows", "is_list_of_samples", "join_batches", "take_rows"]

PLAIN = (str, bytes, int, float, complex, bool, type(None))
"""Types of values that belong to a batch as a whole, such as the name of a task."""


def find_rows(batch: Any) -> int | None:
    """Return the number of samples; None if it cannot be known."""
    size = find_batch_size(batch)
    return next(map(len, _flat_lists(batch)), None) if size is None else size


def count_rows(batch: Any) -> int:
    """Return the number of samples; 1 if it cannot be known."""
    rows = find_rows(batch)
    return 1 if rows is None else rows


def fits_rows(batch: Any, num_rows: int) -> bool:
    """Return True if all tensors and flat lists of a batch are as long; single numbers and texts belong to all rows."""
    if isinstance(batch, torch.Tensor):
        return batch.ndim == 0 or batch.shape[0] == num_rows
    if _is_flat_list(batch):
        return len(batch) == num_rows
    if _is_container(batch):
        return all(fits_rows(part, num_rows) for part in _parts(batch))
    return isinstance(batch, PLAIN)


def is_list_of_samples(batch: Any) -> bool:
    """Return True for a list of mappings or tuples, which a data set that makes batches ready may give."""
    return type(batch) is list and len(batch) > 0 and all(isinstance(sample, (Mapping, tuple)) for sample in batch)


def take_rows(batch: Any, start: int, stop: int, num_rows: int) -> Any:
    """Return the samples from `start` to `stop` of a batch of `num_rows`, in its structure.

    Raises:
        TypeError: A part can be moved to a device, so it holds tensors, and is of a type that cannot be cut.
    """

    def take(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part[start:stop] if part.ndim and part.shape[0] == num_rows else part
        if _is_flat_list(part):
            return part[start:stop] if len(part) == num_rows else part
        if _is_container(part):
            return rebuild(part, take)
        if hasattr(part, "to"):
            raise TypeError(
                f"A batch holds a {type(part).__name__}, which cannot be cut into parts for the ranks. Pass "
                "slice_fn_for_dispatch=, or dispatch_batches=False so that every rank reads the data itself."
            )
        return part

    return take(batch)


def join_batches(batches: Sequence[Any]) -> Any:
    """Return one batch with the samples of all batches.

    Raises:
        TypeError: The batches hold something that is neither a tensor, a list nor a plain object.
        RuntimeError: Tensors differ in other dimensions than the first.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches)) if first.ndim else first
    if _is_flat_list(first):
        return type(first)(item for batch in batches for item in batch)
    if _is_container(first):
        joined = iter([join_batches(parts) for parts in zip(*map(_parts, batches), strict=True)])
        return rebuild(first, lambda _: next(joined))
    if isinstance(first, PLAIN):
        return first
    raise TypeError(
        f"batches that hold {type_of(first)} cannot be joined to be shared out. Let collate_fn return tensors or lists "
        "in its place, or pass dispatch_batches=False so that every rank reads the data itself."
    )


def _is_container(part: Any) -> bool:
    return isinstance(part, (list, tuple, Mapping)) or is_dataclass_instance(part)


def _is_flat_list(part: Any) -> bool:
    return type(part) in (list, tuple) and len(part) > 0 and all(isinstance(item, PLAIN) for item in part)


def _parts(container: Any) -> list[Any]:
    if isinstance(container, (list, tuple)):
        return list(container)
    found: list[Any] = []
    rebuild(container, found.append)
    return found


def _flat_lists(batch: Any) -> list[Any]:
    if _is_flat_list(batch):
        return [batch]
    if not _is_container(batch):
        return []
    return [found for part in _parts(batch) for found in _flat_lists(part)]
