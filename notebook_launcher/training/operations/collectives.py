"""Collectives on nested tensors and objects, through the default process group.

Every process must call an operation, in the same order, with the same structure. Without a process group,
or alone in one, they give back what they got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher import context
from notebook_launcher.settings.whole_numbers import whole_number
from notebook_launcher.training.argument_checks import check_number
from notebook_launcher.training.operations.checking import require_alike
from notebook_launcher.training.operations.nested import map_tensors
from notebook_launcher.training.operations.tensors import TensorInformation
from notebook_launcher.training.operations.wire_devices import collective_device
from notebook_launcher.wording.choices import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "copy_tensor_to_devices",
    "gather",
    "gather_numbers",
    "gather_object",
    "reduce",
    "world_size",
]

REDUCTIONS = ("sum", "mean", "max", "none")

PACKED_BYTES = 2**20
"""Up to this size, the tensors of a structure are gathered in one message. Two of 1.5 kB took 743 µs one by one and
423 µs together (gloo, 2 processes on 2 busy cores); above it, copying costs more than a second message."""


def world_size() -> int:
    """Return the number of processes in the default group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@context.activity(context.WAITING)
def gather(tensor: Any) -> Any:
    """Concatenate each tensor of all processes along dimension 0, in rank order.

    Args:
        tensor: Nested tensors, of the same shapes and dtypes on all processes. A tensor without dimensions
            counts as one of length 1. Any dtype, contiguous or not.

    Returns:
        The same structure; a tensor of shape (n, ...) becomes (processes * n, ...), on its device, without
        gradient.

    Raises:
        TypeError: A leaf is neither a tensor nor None.
        DistributedOperationException: In debug mode, shapes or dtypes differ.
    """
    if world_size() == 1:
        return tensor
    require_alike("gather", tensor)
    found: list[torch.Tensor] = []
    map_tensors("gather", found.append, tensor)
    gathered = iter(_gather_all(found))
    return map_tensors("gather", lambda part: next(gathered).to(part.device), tensor)


@context.activity(context.WAITING)
def gather_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, in rank order; as many on each, of 64 bits."""
    num_processes = dist.get_world_size()
    mine = torch.tensor(numbers, dtype=torch.int64, device=collective_device(torch.device("cpu")))
    everyone = mine.new_empty(num_processes * len(numbers))
    _all_gather(everyone, mine)
    by_rank: list[list[int]] = everyone.view(num_processes, len(numbers)).tolist()
    return by_rank


def _gather_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    wires = [wire if wire.ndim else wire[None] for wire in map(_to_wire, tensors)]
    if not wires:
        return []
    together = sum(wire.nbytes for wire in wires) <= PACKED_BYTES and len({wire.device for wire in wires}) == 1
    if together:
        return _gather_packed(wires)
    return [gathered for wire in wires for gathered in _gather_packed([wire])]


def _gather_packed(wires: list[torch.Tensor]) -> list[torch.Tensor]:
    num_processes = dist.get_world_size()
    parts = [_as_bytes(wire) for wire in wires]
    mine = torch.cat(parts) if len(parts) > 1 else parts[0]
    everyone = torch.empty(num_processes * mine.numel(), dtype=mine.dtype, device=mine.device)
    _all_gather(everyone, mine)
    columns = list(everyone.view(num_processes, mine.numel()).split_with_sizes([part.numel() for part in parts], dim=1))
    if len(columns) > 1:
        # Of its own memory, since a dtype's elements must start at a multiple of their size.
        columns = [column.clone(memory_format=torch.contiguous_format) for column in columns]
    return [
        column.reshape(-1).view(wire.dtype).view(num_processes * wire.shape[0], *wire.shape[1:])
        for column, wire in zip(columns, wires, strict=True)
    ]


def _all_gather(everyone: torch.Tensor, mine: torch.Tensor) -> None:
    # Its name since torch 2.13, which warns of the old one.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(everyone, mine)


@context.activity(context.WAITING)
def gather_object(object: Any) -> Any:  # noqa: A002 - Accelerate's name
    """Join the lists of all processes, in rank order.

    Args:
        object: A list, or another iterable, of whatever can be pickled; as long as it likes.

    Returns:
        One flat list.

    Raises:
        TypeError: `object` cannot be iterated over.
    """
    if world_size() == 1:
        return object
    try:
        mine = list(object)
    except TypeError:
        raise TypeError(
            f"gather_object got {object!r}, but joins lists. Put it into a list: gather_object([...])."
        ) from None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [item for items in everyone for item in items]


@context.activity(context.WAITING)
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Give all processes the tensors of one.

    Args:
        tensor: Nested tensors, of the same shapes and dtypes on all processes. They are overwritten.
        from_process: Number of the process that has them.

    Returns:
        The same structure with the same tensors. Only a tensor that cannot be written to, since several of
        its elements share memory (`expand`), is replaced by a new one.

    Raises:
        TypeError: A leaf is neither a tensor nor None.
        ValueError: No process has this number.
        DistributedOperationException: In debug mode, shapes or dtypes differ.
    """
    if world_size() == 1:
        return tensor
    _check_source(from_process)
    require_alike("broadcast", tensor)
    return map_tensors("broadcast", lambda part: _broadcast_one(part, from_process), tensor)


def _broadcast_one(tensor: torch.Tensor, from_process: int) -> torch.Tensor:
    wire = _to_wire(tensor)
    dist.broadcast(_as_bytes(wire), src=from_process)
    if wire.data_ptr() == tensor.data_ptr():
        return tensor
    wire = wire.to(tensor.device)
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return wire
    with torch.no_grad():
        return tensor.copy_(wire)


@context.activity(context.WAITING)
def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor | None:
    """Give all processes the tensor that one has; the others need not know its shape.

    Args:
        tensor: On one process the tensor, on the others None.

    Returns:
        The tensor, on each process on a device of the same kind.

    Raises:
        ValueError: No process has one, or several have.
    """
    if world_size() == 1:
        return tensor
    mine = None if tensor is None else (TensorInformation(tensor.shape, tensor.dtype), tensor.device.type)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    owners = [rank for rank, given in enumerate(everyone) if given is not None]
    if len(owners) != 1:
        raise ValueError(
            f"copy_tensor_to_devices got a tensor on {f'processes {owners}' if owners else 'no process'}. Pass it on "
            "one process, and None on the others."
        )
    if tensor is None:
        information, device = everyone[owners[0]]
        tensor = torch.empty(information.shape, dtype=information.dtype, device=device)
    copied: torch.Tensor = broadcast(tensor, from_process=owners[0])
    return copied


@context.activity(context.WAITING)
def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of `object_list`, in place, by the items of process `from_process`, and return the list.

    The list must be equally long on all processes; the items must be picklable.

    Raises:
        ValueError: No process has this number.
    """
    if world_size() > 1:
        _check_source(from_process)
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


def _check_source(from_process: int) -> None:
    whole_number("from_process", from_process, minimum=0, maximum=world_size() - 1)


@context.activity(context.WAITING)
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine each tensor over all processes, element by element.

    Args:
        tensor: Nested tensors, of the same shapes and dtypes on all processes. They are not changed.
        reduction: `"sum"`; `"mean"`, the sum divided by the number of processes; `"max"`; or `"none"`, each
            process' own.
        scale: Factor of the result.

    Returns:
        The same structure with new tensors on the same devices, without gradient. 16-bit floats are summed in
        float32; as with `torch.sum`, integers and booleans are summed in int64. The mean of integers is a float.

    Raises:
        ValueError: The reduction is unknown.
        TypeError: A leaf is neither a tensor nor None, or the scale is not a number.
        DistributedOperationException: In debug mode, shapes or dtypes differ.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(unknown("reduction", reduction, REDUCTIONS))
    check_number("scale", scale)
    if world_size() > 1:
        require_alike("reduce", tensor)
    return map_tensors("reduce", lambda part: _reduce_one(part, reduction, scale), tensor)


def _reduce_one(tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
    result = tensor.detach().clone()
    if world_size() > 1 and reduction != "none":
        result = _all_reduce(tensor, reduction)
    return result if scale == 1.0 else result * scale


def _all_reduce(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    # gloo adds neither int16 nor booleans, and 16-bit floats with 8 or 11 bits of precision at each step.
    wide = torch.float32 if tensor.dtype in {torch.float16, torch.bfloat16} else tensor.dtype
    if not (wide.is_floating_point or wide.is_complex):
        wide = torch.int64
    wire = _to_wire(tensor).to(wide, copy=True)
    dist.all_reduce(wire, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
    if reduction == "mean":
        wire = wire / dist.get_world_size()
    keeps_dtype = reduction == "max" or tensor.is_floating_point()
    return wire.to(tensor.device, tensor.dtype if keeps_dtype else wire.dtype)


def _to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return the data where the group can take it, without gradient; the same memory if possible."""
    data = tensor.detach().resolve_conj().resolve_neg()
    return data.to(collective_device(tensor.device)).contiguous()


def _as_bytes(wire: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes, since backends know some dtypes only (gloo: no int16, no complex numbers)."""
    return wire.view(-1).view(torch.uint8)
