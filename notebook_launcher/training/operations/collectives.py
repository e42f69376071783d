"""Collectives on nested tensors and objects, through the default process group.

Every process must call an operation, in the same order, with the same structure. Without a process group,
or alone in one, they give back what they got.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher import context
from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.training.operations.checking import (
    Agreed,
    Pickled,
    agree,
    broadcast_objects,
    collective_device,
    exchange_objects,
    gather_bytes,
)
from notebook_launcher.training.operations.nested import (
    TensorInformation,
    find_leaves,
    map_tensors,
    recursively_apply,
)
from notebook_launcher.training.plugins import check_number
from notebook_launcher.wording import unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


REDUCTIONS = ("sum", "mean", "max", "none")

SENT = torch.Tensor, Pickled
"""Types of leaves that an operation replaces."""

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
        tensor: Nested tensors, matched between processes by name or index: of the same dtypes and, but for dimension
            0, shapes. A tensor without dimensions counts as one of length 1. Any dtype, contiguous or not.

    Returns:
        The same structure; each tensor with the rows of all processes, on its device, without gradient.

    Raises:
        TypeError: A leaf is neither a tensor nor None.
        DistributedOperationException: Names, dtypes or shapes differ; on all processes.
    """
    if world_size() == 1:
        return tensor
    agreed = agree("gather", list(find_leaves(tensor)), row_form)
    return put_back(tensor, gather_agreed(agreed))


def row_form(tensor: torch.Tensor) -> str:
    """Describe the rows of a tensor: `torch.float32 [*, 3]`."""
    return f"{tensor.dtype} {['*', *tensor.shape[1:]] if tensor.ndim else []}"


def _full_form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def put_back(data: Any, results: dict[int, Any]) -> Any:
    """Return `data` with the results, which come by their places among the leaves, for all tensors and `Pickled`."""
    in_order = iter([results[at] for at in sorted(results)])
    return recursively_apply(lambda _: next(in_order), data, test_type=lambda leaf: isinstance(leaf, SENT))


def gather_agreed(
    agreed: Sequence[Agreed], kept: Callable[[Agreed], Sequence[int]] = operator.attrgetter("lengths")
) -> dict[int, torch.Tensor]:
    """Return, by its place among the leaves, each tensor with the rows of all ranks, in rank order, on its device.

    Of each rank's rows `kept` says how many are wanted, the first ones.
    """
    if not agreed:
        return {}
    wires = [wire if wire.ndim else wire[None] for wire in (_to_wire(each.tensor) for each in agreed)]
    pairs = list(zip(agreed, wires, strict=True))
    in_all = sum(_row_bytes(wire) * max(each.lengths) for each, wire in pairs)
    together = in_all <= PACKED_BYTES and len({wire.device for wire in wires}) == 1
    groups = [pairs] if together else [[pair] for pair in pairs]
    gathered = [tensor for group in groups for tensor in _gather_packed(group, kept)]
    return {each.at: tensor.to(each.tensor.device) for each, tensor in zip(agreed, gathered, strict=True)}


def _row_bytes(wire: torch.Tensor) -> int:
    return wire.element_size() * math.prod(wire.shape[1:])


def _gather_packed(
    pairs: list[tuple[Agreed, torch.Tensor]], kept: Callable[[Agreed], Sequence[int]]
) -> list[torch.Tensor]:
    """Gather tensors, given with their wires, in one message."""
    parts = [_as_bytes(wire) for _, wire in pairs]
    ranks = range(dist.get_world_size())
    sizes = [sum(each.lengths[rank] * _row_bytes(wire) for each, wire in pairs) for rank in ranks]
    everyone = gather_bytes(torch.cat(parts) if len(parts) > 1 else parts[0], sizes)
    starts, results = [0] * len(ranks), []
    for each, wire in pairs:
        size, rows = _row_bytes(wire), list(kept(each))
        if len(pairs) == 1 and rows == each.lengths and len(set(rows)) == 1:
            column = everyone.view(-1)
        else:
            # Of its own memory, since a dtype's elements must start at a multiple of their size.
            column = torch.cat([everyone[rank, starts[rank] :][: rows[rank] * size] for rank in ranks])
        results.append(column.view(wire.dtype).view(sum(rows), *wire.shape[1:]))
        starts = [start + length * size for start, length in zip(starts, each.lengths, strict=True)]
    return results


@context.activity(context.WAITING)
def gather_object(object: Any) -> Any:  # noqa: A002 - Accelerate's name
    """Join the lists of all processes, in rank order.

    Args:
        object: A list, or another iterable, of whatever can be pickled; as long as it likes.

    Returns:
        One flat list.

    Raises:
        TypeError: `object` cannot be iterated over, or its items cannot be pickled; on all processes.
        DistributedOperationException: Another process has called another operation; on all processes.
    """
    if world_size() == 1:
        return object
    everyone = exchange_objects("gather_object", lambda: list(object))
    return [item for items in everyone for item in items]


@context.activity(context.WAITING)
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Give all processes the tensors of one.

    Args:
        tensor: Nested tensors, of the same names, shapes and dtypes on all processes. They are overwritten.
        from_process: Number of the process that has them.

    Returns:
        The same structure with the same tensors. Only a tensor that cannot be written to, since several of
        its elements share memory (`expand`), is replaced by a new one.

    Raises:
        TypeError: A leaf is neither a tensor nor None.
        ValueError: No process has this number.
        DistributedOperationException: Names, dtypes or shapes differ; on all processes.
    """
    if world_size() == 1:
        return tensor
    _check_source(from_process)
    agreed = agree(f"broadcast(from_process={from_process})", list(find_leaves(tensor)), _full_form)
    return put_back(tensor, {each.at: _broadcast_one(each.tensor, from_process) for each in agreed})


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
    everyone = exchange_objects("copy_tensor_to_devices", lambda: mine)
    owners = [rank for rank, given in enumerate(everyone) if given is not None]
    if len(owners) != 1:
        raise ValueError(
            f"copy_tensor_to_devices got a tensor on {f'processes {owners}' if owners else 'no process'}. Pass it on "
            "one process, and None on the others."
        )
    if tensor is None:
        information, device = everyone[owners[0]]
        tensor = torch.empty(information.shape, dtype=information.dtype, device=device)
    return _broadcast_one(tensor, owners[0])


@context.activity(context.WAITING)
def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of `object_list`, in place, by the items of process `from_process`, and return the list.

    The list must be equally long on all processes; the items must be picklable.

    Raises:
        ValueError: No process has this number.
        TypeError: The items cannot be pickled; on all processes.
        DistributedOperationException: The lists are not equally long; on all processes.
    """
    if world_size() > 1:
        _check_source(from_process)
        operation = f"broadcast_object_list(from_process={from_process})"
        object_list[:] = broadcast_objects(operation, object_list, from_process)
    return object_list


def _check_source(from_process: int) -> None:
    whole_number("from_process", from_process, minimum=0, maximum=world_size() - 1)


@context.activity(context.WAITING)
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine each tensor over all processes, element by element.

    Args:
        tensor: Nested tensors, of the same names, shapes and dtypes on all processes. They are not changed.
        reduction: `"sum"`; `"mean"`, the sum divided by the number of processes; `"max"`; or `"none"`, each
            process' own.
        scale: Factor of the result.

    Returns:
        The same structure with new tensors on the same devices, without gradient. 16-bit floats are summed in
        float32; as with `torch.sum`, integers and booleans are summed in int64. The mean of integers is a float.

    Raises:
        ValueError: The reduction is unknown.
        TypeError: A leaf is neither a tensor nor None, or is complex, with `"max"`; or the scale is not a number.
        DistributedOperationException: Names, dtypes or shapes differ; on all processes.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(unknown("reduction", reduction, REDUCTIONS))
    check_number("scale", scale)
    leaves, alone = list(find_leaves(tensor)), world_size() == 1 or reduction == "none"
    agreed = [] if alone else agree(f"reduce(reduction={reduction!r})", leaves, _full_form)
    for path, leaf in leaves:
        if reduction == "max" and isinstance(leaf, torch.Tensor) and leaf.is_complex():
            raise TypeError(
                f'reduce(reduction="max") got complex numbers, as {path}, of which none is the largest. Reduce '
                "tensor.abs(), or torch.view_as_real(tensor)."
            )
    if alone:
        return map_tensors("reduce", lambda part: _scaled(_alone(part, reduction), scale), tensor)
    return put_back(tensor, {each.at: _scaled(all_reduce(each.tensor, reduction), scale) for each in agreed})


def _alone(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return a copy, of the dtype that several ranks would get."""
    counts = reduction in ("sum", "mean") and not (tensor.is_floating_point() or tensor.is_complex())
    if not counts:
        return tensor.detach().clone()
    return tensor.detach().to(torch.int64 if reduction == "sum" else torch.get_default_dtype(), copy=True)


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor if scale == 1.0 else tensor * scale


def all_reduce(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the sum, mean or maximum of a tensor that is known to be alike on all ranks; see `reduce`."""
    # gloo adds neither int16, booleans nor floats of 8 bits, and those of 16 with few bits of precision at each step.
    wide = torch.float32 if tensor.is_floating_point() and tensor.itemsize < 4 else tensor.dtype
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


# --------------------------------------------------------------------------------------------------------------------
# Making tensors equally long on all processes, and batches divisible by their number.


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: Any = 0,
    pad_first: bool = False,
) -> Any:
    """Make each tensor as long as the longest that any process has, so that they can be gathered.

    All lengths are exchanged at once. Tensors are matched by name or index.

    Args:
        tensor: Nested tensors, of the same names, dtypes and numbers of dimensions on all processes.
        dim: Along which dimension; tensors that do not have it stay as they are.
        pad_index: Value of the padding: a number, or a tensor that broadcasts to the padding. It is cast to each
            tensor's dtype, as by `tensor.fill_`: -100 is 156 in uint8, and True in a mask.
        pad_first: True if the padding comes before the data.

    Returns:
        The same structure. Its dtypes are kept.

    Raises:
        TypeError: A leaf is neither a tensor nor None.
        ValueError: A tensor is of torch's nested kind, which has no one length.
        DistributedOperationException: Names, dtypes or numbers of dimensions differ; on all processes.
    """
    if world_size() == 1:
        return tensor
    agreed = agree(
        f"pad_across_processes(dim={dim})", list(find_leaves(tensor)), lambda part: f"{part.dtype} {part.ndim}", dim=dim
    )
    padded = {each.at: _pad(each.tensor, dim, max(each.lengths), pad_index, first=pad_first) for each in agreed}
    return put_back(tensor, padded)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Lengthen each tensor until `num_processes` divides the batch, by repeating its last sample.

    Args:
        tensor: Nested tensors.
        batch_size: Number of samples.
        num_processes: Number that must divide it.
        dim: The dimension that counts samples.
    """
    missing = -batch_size % num_processes
    return map_tensors("pad_input_tensors", lambda part: _repeat_last(part, dim, missing), tensor)


def _pad(tensor: torch.Tensor, dim: int, longest: int, pad_index: Any, *, first: bool) -> torch.Tensor:
    if not -tensor.ndim <= dim < tensor.ndim or (missing := longest - tensor.shape[dim]) == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    padding = tensor.new_empty(shape)
    padding[...] = pad_index
    return torch.cat([padding, tensor] if first else [tensor, padding], dim=dim)


def _repeat_last(tensor: torch.Tensor, dim: int, missing: int) -> torch.Tensor:
    if missing == 0 or not -tensor.ndim <= dim < tensor.ndim:
        return tensor
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    return torch.cat([tensor, *[last] * missing], dim=dim)
