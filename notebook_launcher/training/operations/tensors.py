"""Operations of one process on the tensors of a nested batch: move, slice, concatenate, convert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.operations.nested import (
    find_tensors,
    honor_type,
    is_dataclass_instance,
    rebuild,
    recursively_apply,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInformation:
    """The facts that another process needs to receive a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> Any:
    """Move a nested batch to `device`.

    Args:
        tensor: Tensors, objects with a `to(device)` (which decide for themselves), or containers of them.
        device: Destination.
        non_blocking: True if copies from pinned memory may continue while this process runs on.
        skip_keys: Keys of mappings and names of dataclass fields whose values stay where they are.

    Returns:
        The same structure; what has no `to` is unchanged.
    """
    skip = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def walk(part: Any) -> Any:
        # A mapping's own `to` (BatchEncoding has one) knows nothing of keys to skip.
        if hasattr(part, "to") and not isinstance(part, type) and not (skip and isinstance(part, Mapping)):
            return _move(part, device, non_blocking=non_blocking)
        if isinstance(part, (list, tuple, Mapping)) or is_dataclass_instance(part):
            return rebuild(part, walk, skip)
        return part

    return walk(tensor)


def _move(part: Any, device: torch.device | str | int, *, non_blocking: bool) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=non_blocking)
    try:
        return part.to(device, non_blocking=non_blocking)
    except TypeError:
        # Not every `to` knows `non_blocking`.
        return part.to(device)


def find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor that has a length; None without any."""
    return next((tensor.shape[0] for tensor in find_tensors(data) if tensor.ndim), None)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor; None without any."""
    return next((tensor.device for tensor in find_tensors(data)), None)


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,  # noqa: ARG001 - an argument of slicing functions for dispatched batches
    num_processes: int | None = None,  # noqa: ARG001
) -> Any:
    """Cut every tensor along dimension 0; tensors without dimensions, and whatever else, stay whole."""
    return recursively_apply(lambda tensor: tensor[tensor_slice] if tensor.ndim else tensor, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join batches of one structure, tensor by tensor.

    Args:
        data: The batches. Where a batch holds something else than tensors, there can only be one.
        dim: Along which dimension; tensors without dimensions become the items of one tensor.

    Raises:
        TypeError: Several batches hold something that is not a tensor.
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([tensor if tensor.ndim else tensor[None] for tensor in data], dim=dim)
    if isinstance(first, (list, tuple)):
        return honor_type(first, [concatenate(parts, dim=dim) for parts in zip(*data, strict=True)])
    if isinstance(first, Mapping):
        joined = {key: concatenate([batch[key] for batch in data], dim=dim) for key in first}
        return _replace(first, joined)
    if is_dataclass_instance(first):
        names = [field.name for field in dataclasses.fields(first)]
        return _replace(first, {n: concatenate([getattr(batch, n) for batch in data], dim=dim) for n in names})
    if len(data) == 1:
        return first
    raise TypeError(
        f"concatenate got {len(data)} batches that hold a {type(first).__name__}, and only tensors can be joined. "
        "Turn it into a tensor in the data set or in collate_fn, or leave it out."
    )


def _replace(container: Any, parts: dict[Any, Any]) -> Any:
    values = iter(parts.values())
    return rebuild(container, lambda _: next(values))


def listify(data: Any) -> Any:
    """Turn every tensor into numbers: nested lists, or one number where it has no dimensions."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Turn float16 and bfloat16 tensors of a nested structure into float32; gradients flow through it."""

    def is_half(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in {torch.float16, torch.bfloat16}

    return recursively_apply(lambda part: part.float(), tensor, test_type=is_half)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor by its `TensorInformation`, so that the rest can be sent by pickle."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace every `TensorInformation` by a tensor of that shape, on the CPU, with arbitrary contents."""
    return recursively_apply(
        lambda information: torch.empty(information.shape, dtype=information.dtype),
        data_structure,
        test_type=lambda value: isinstance(value, TensorInformation),
    )
