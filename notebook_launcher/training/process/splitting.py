"""One process' share of a collection: the pieces are contiguous, and the first ones get one item more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["split"]


def split(inputs: Any, process_index: int, num_processes: int, *, pad: bool = False) -> Any:
    """Return the share of one process.

    Args:
        inputs: A list, tuple or other sequence, a tensor or array (dimension 0 is split), a pandas object (its
            rows are), a `datasets.Dataset`, or a mapping of these, all of the same length.
        process_index: Number of the process that gets the share.
        num_processes: Number of shares.
        pad: True if the last item is repeated where that makes all shares equally long.

    Raises:
        ValueError: The values of a mapping differ in length.
        TypeError: `inputs` cannot be split, a string for instance.
    """
    length = _length(inputs)
    share, extras = divmod(length, num_processes)
    start = process_index * share + min(process_index, extras)
    size = share + (process_index < extras)
    missing = share + (extras > 0) - size if pad and length else 0
    return _take(inputs, start, size, [length - 1] * missing)


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        _require_splittable(inputs)
        return len(inputs)
    lengths = {key: _length(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
        raise ValueError(
            f"split_between_processes got a mapping whose values differ in length ({listed}). Each process gets the "
            "same piece of every value, so they must be equally long."
        )
    return next(iter(lengths.values()), 0)


def _require_splittable(inputs: Any) -> None:
    sequence = isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes))
    array = hasattr(inputs, "shape") and hasattr(inputs, "__getitem__") and len(inputs.shape) > 0
    if not (sequence or array or _is_dataset(inputs)):
        raise TypeError(
            f"split_between_processes got {_short(inputs)}, a {type(inputs).__name__}, which has no items to share "
            "out. It takes a list, tuple, tensor, array or data set, or a dict of them."
        )


def _take(inputs: Any, start: int, size: int, more: list[int]) -> Any:
    """Return the items from `start` on, and the items with the numbers `more`."""
    if isinstance(inputs, Mapping):
        return {key: _take(value, start, size, more) for key, value in inputs.items()}
    if _is_dataset(inputs):
        return inputs.select([*range(start, start + size), *more])
    items = getattr(inputs, "iloc", inputs)
    if not isinstance(inputs, Sequence):
        return items[[*range(start, start + size), *more]] if more else items[start : start + size]
    taken = [inputs[at] for at in (*range(start, start + size), *more)]
    return tuple(taken) if isinstance(inputs, tuple) else taken


def _is_dataset(inputs: Any) -> bool:
    # Slicing a datasets.Dataset gives a dict of columns, and `select` a data set.
    return hasattr(inputs, "select") and hasattr(inputs, "column_names")


def _short(inputs: Any) -> str:
    if isinstance(inputs, torch.Tensor):
        return "a tensor without dimensions"
    text = repr(inputs)
    return text if len(text) <= 60 else f"{text[:57]}..."
