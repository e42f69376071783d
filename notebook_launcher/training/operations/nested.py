"""Nested lists, tuples, mappings and dataclasses of tensors: a walk through them, and what one process does to them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence


def is_dataclass_instance(value: Any) -> bool:
    """Return True if `value` is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_container(value: Any) -> bool:
    """Return True if `value` is one of the containers that operations walk through."""
    return isinstance(value, (list, tuple, Mapping)) or is_dataclass_instance(value)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items of `generator` as a list, tuple or named tuple of the type of `obj`."""
    if hasattr(obj, "_make") and hasattr(obj, "_fields"):
        return obj._make(generator)
    return type(obj)(generator)


def rebuild(data: Any, func: Callable[[Any], Any], skip: Collection[Any] = ()) -> Any:
    """Return a container like `data`, with `func` applied to each of its parts, except under the keys `skip`.

    A mapping that is more than a dict (`BatchEncoding`, `defaultdict`, transformers' `ModelOutput`) and a
    dataclass are copied, and then their parts replaced, so that what else they hold comes along.
    """
    if isinstance(data, (list, tuple)):
        return honor_type(data, [func(part) for part in data])
    if not isinstance(data, Mapping):
        clone = copy.copy(data)
        for field in dataclasses.fields(data):
            if field.name not in skip and hasattr(data, field.name):
                # A frozen dataclass refuses the plain assignment.
                object.__setattr__(clone, field.name, func(getattr(data, field.name)))
        return clone
    parts = {key: part if key in skip else func(part) for key, part in data.items()}
    if type(data) is dict:
        return parts
    if not isinstance(data, MutableMapping):
        return type(data)(parts)  # type: ignore[call-arg]
    clone = copy.copy(data)
    for key, part in parts.items():
        clone[key] = part
    return clone


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = torch.is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func` to every leaf of a nested batch that passes `test_type`.

    Args:
        func: Called as `func(leaf, *args, **kwargs)`.
        data: Lists, tuples, named tuples, mappings and dataclasses in each other; their types are kept.
        args: More positional arguments for `func`.
        test_type: Returns True for a leaf that `func` is for; by default for tensors.
        error_on_other_type: True if another leaf is an error; if not, it stays as it is.
        kwargs: More keyword arguments for `func`.

    Raises:
        TypeError: `error_on_other_type` is set and a leaf does not pass `test_type`.
    """

    def walk(part: Any) -> Any:
        if isinstance(part, (list, tuple, Mapping)):
            return rebuild(part, walk)
        if test_type(part):
            return func(part, *args, **kwargs)
        if is_dataclass_instance(part):
            return rebuild(part, walk)
        if error_on_other_type:
            raise TypeError(wrong_leaf(str(getattr(func, "__name__", repr(func))), part))
        return part

    return walk(data)


def map_tensors(operation: str, func: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Apply `func` to every tensor; None stays, and any other leaf is a TypeError that names `operation`."""

    def walk(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return func(part)
        if part is None:
            return None
        if is_container(part):
            return rebuild(part, walk)
        raise TypeError(wrong_leaf(operation, part))

    return walk(data)


def named_parts(container: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container, in order, each with its step of a path: `['x']`, `[0]` or `.ids`.

    A key that says nothing of itself in another process, such as an object without a `repr` of its own, counts by its
    place in the mapping.
    """
    if isinstance(container, (list, tuple)):
        names = getattr(container, "_fields", None) if hasattr(container, "_make") else None
        steps = [f"[{at}]" for at in range(len(container))] if names is None else [f".{name}" for name in names]
        return list(zip(steps, container, strict=True))
    if isinstance(container, Mapping):
        return [(f"[{_key(key, at)}]", part) for at, (key, part) in enumerate(container.items())]
    names = [field.name for field in dataclasses.fields(container) if hasattr(container, field.name)]
    return [(f".{name}", getattr(container, name)) for name in names]


def find_leaves(data: Any, path: str = "value") -> Iterator[tuple[str, Any]]:
    """Yield what the containers of a nested value hold at last, in order, each with its path: `value['x'][0].ids`.

    An empty container is a leaf.
    """
    parts = named_parts(data) if is_container(data) else []
    if not parts:
        yield path, data
    for step, part in parts:
        yield from find_leaves(part, path + step)


def _key(key: Any, at: int) -> str:
    text = "" if isinstance(key, (torch.Tensor, frozenset)) else repr(key)
    return f"<{type(key).__name__} {at}>" if not text or " at 0x" in text else text


def find_tensors(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested batch, in order."""
    return (leaf for _, leaf in find_leaves(data) if isinstance(leaf, torch.Tensor))


def wrong_leaf(operation: str, leaf: Any) -> str:
    """Return the error for a leaf that an operation on tensors cannot take."""
    text = repr(leaf)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    if isinstance(leaf, (bool, int, float)):
        instead = f"write torch.tensor({text})"
    else:
        instead = "gather_object([...]) and broadcast_object_list([...]) take other objects"
    return (
        f"{operation} got {text}, of type {type(leaf).__name__}. It takes tensors, also in nested lists, tuples, "
        f"dicts and dataclasses; {instead}."
    )


# --------------------------------------------------------------------------------------------------------------------
# Operations of one process on the tensors of a batch: move, slice, join, convert.


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
