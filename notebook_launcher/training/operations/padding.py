"""Making tensors equally long on all processes, and batches divisible by their number."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from notebook_launcher.training.operations.checking import agree
from notebook_launcher.training.operations.collectives import put_back, world_size
from notebook_launcher.training.operations.nested import find_leaves, map_tensors

__all__ = ["pad_across_processes", "pad_input_tensors"]


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
    return torch.cat(list(itertools.chain([tensor], itertools.repeat(last, missing))), dim=dim)
