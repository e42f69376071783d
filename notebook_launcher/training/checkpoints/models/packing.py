"""Packs state dicts into files: each tensor once, and no file larger than asked for."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.layouts.sharded import local_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Shards", "check_tensors", "compact", "find_tied", "parse_size", "shard", "spread_ties"]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def find_tied(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the second names of tied tensors, each with the tensor's first name.

    Two tensors are one if they show the same memory in the same way. Views of different parts of one
    storage are different tensors.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            continue
        tensor = local_part(tensor)  # noqa: PLW2901 - a spread tensor has no memory of its own
        if tensor.is_meta or tensor.numel() == 0:
            continue
        view = tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
        kept = first.setdefault(view, name)
        if kept != name:
            tied[name] = kept
    return tied


def spread_ties(state: Mapping[str, Any]) -> dict[str, str]:
    """Return `find_tied` of rank 0 on all ranks, which call it together: a rank's part of a tensor may be empty."""
    import torch.distributed as dist

    found = [find_tied(state)]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def compact(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with every tensor contiguous and in a storage of its own size; tied tensors stay tied.

    `torch.save` writes a view's whole storage, and safetensors refuses tensors that overlap.
    """
    tied = find_tied(state)
    compacted: dict[str, Any] = {}
    for name, value in state.items():
        if name in tied:
            compacted[name] = compacted[tied[name]]
        elif isinstance(value, torch.Tensor):
            compacted[name] = _alone(value.detach())
        else:
            compacted[name] = value
    return compacted


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def parse_size(size: int | str) -> int:
    """Return a size in bytes: `5_000_000`, `"5MB"` (5 * 10**6) or `"5MiB"` (5 * 2**20).

    Raises:
        ValueError: The size is neither a number nor such a text, or not above zero.
    """
    number = 0
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    elif isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", size.upper())
        if match is not None:
            units = BINARY_UNITS if match[3] else UNITS
            number = int(float(match[1]) * units[match[2]])
    if number < 1:
        raise ValueError(
            f"max_shard_size={size!r} is not a size. It can be a number of bytes, or text such as '200MB' or '10GB'."
        )
    return number


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The distribution of tensors over files."""

    files: dict[str, list[str]]
    """The names of the tensors in each file."""
    total_size: int
    """Bytes of all tensors, counting tied tensors once."""

    @property
    def index(self) -> dict[str, Any] | None:
        """The index of several files, in Hugging Face's form; None for a single file."""
        if len(self.files) == 1:
            return None
        weight_map = {name: file for file, names in self.files.items() for name in names}
        return {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}


def shard(state: Mapping[str, Any], max_size: int, pattern: str) -> Shards:
    """Spread tensors over files, in their order.

    A tensor that is larger than a file may be gets a file of its own. Tied tensors share a file.

    Args:
        state: Tensors, each in a storage of its own size, and what else is in a state dict.
        max_size: Bytes of tensors in a file.
        pattern: The files' name, with `{}` where `-00001-of-00003` goes.
    """
    tied = find_tied(state)
    groups: list[list[str]] = []
    open_group: list[str] | None = None
    filled = total = 0
    for name in (name for name in state if name not in tied):
        value = state[name]
        size = value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
        total += size
        if size > max_size:
            groups.append([name])
        elif open_group is None or filled + size > max_size:
            open_group, filled = [name], size
            groups.append(open_group)
        else:
            open_group.append(name)
            filled += size
    for name, first in tied.items():
        next(group for group in groups if first in group).append(name)
    return Shards(files=_named(groups or [[]], pattern), total_size=total)


def _named(groups: list[list[str]], pattern: str) -> dict[str, list[str]]:
    if len(groups) == 1:
        return {pattern.format(""): groups[0]}
    return {pattern.format(f"-{at:05d}-of-{len(groups):05d}"): names for at, names in enumerate(groups, 1)}


def check_tensors(state: Mapping[str, Any], *, safe: bool) -> None:
    """Raise CheckpointError if something in a model's state cannot be written."""
    absent = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if absent:
        raise CheckpointError(
            f"{_some(absent)} on the meta device, which holds no data. Load the weights before saving them."
        )
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if safe and others:
        kind = type(state[others[0]]).__name__
        raise CheckpointError(
            f"{_some(others)} no tensor but {kind}, and safetensors holds only tensors. Pass safe_serialization=False."
        )


def _some(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first!r} and {len(more)} more are" if more else f"{first!r} is"
