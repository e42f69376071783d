"""Clipping of gradients, even if some are sharded (over one mesh or several) and others are whole.

Torch's functions take one kind at a time (torch 2.13: "got mixed torch.Tensor and DTensor").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training.spread_tensors import whole_tensor
from notebook_launcher.wording.text import type_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["clip_norm_", "clip_value_", "given_parameters"]


def clip_norm_(parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients down to a total norm, and return the norm before, a whole tensor on every rank."""
    groups = _by_mesh(parameters)
    if len(groups) == 1 and next(iter(groups)) is None:
        return torch.nn.utils.clip_grad_norm_(groups[None], max_norm, norm_type=norm_type)
    norms = [_total_norm(group, norm_type) for group in groups.values()]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_value_(parameters: Any, clip_value: float) -> None:
    """Clip each element of the gradients to `[-clip_value, clip_value]`."""
    for group in filter(None, _by_mesh(parameters).values()):  # Without gradients, torch's function fails.
        torch.nn.utils.clip_grad_value_(group, clip_value)


def given_parameters(given: Any) -> Iterable[torch.Tensor]:
    """Return the parameters that a call was given: one, several, or a model for all of its own."""
    if isinstance(given, torch.Tensor):
        return [given]
    parameters: Iterable[torch.Tensor] = given.parameters() if isinstance(given, torch.nn.Module) else given
    try:
        return iter(parameters)
    except TypeError:
        raise TypeError(
            f"Gradients of {type_of(given)} cannot be clipped. Pass parameters, such as model.parameters(), or a model."
        ) from None


def _by_mesh(parameters: Any) -> dict[Any, list[torch.Tensor]]:
    """Return the parameters that have a gradient, by the mesh that it is sharded over; None for whole gradients."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in given_parameters(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        # A plain tensor is not asked: it takes 1 µs to find that it has no such attribute.
        mesh = None if type(gradient) is torch.Tensor else getattr(gradient, "device_mesh", None)
        groups.setdefault(mesh, []).append(parameter)
    return groups or {None: []}


def _total_norm(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    grads: list[Any] = [parameter.grad for parameter in parameters]
    if float(norm_type) == math.inf and hasattr(grads[0], "device_mesh"):
        return _largest(grads)
    norm = torch.nn.utils.get_total_norm(grads, norm_type)
    return whole_tensor(norm)


def _largest(gradients: list[Any]) -> torch.Tensor:
    """Return the largest absolute value of sharded gradients, where torch fails if a rank's part of one is empty."""
    parts = [gradient.to_local() for gradient in gradients]
    # Not every backend reduces the maximum of 16-bit numbers.
    exact = torch.promote_types(parts[0].dtype, torch.float32)
    found = [torch.linalg.vector_norm(part.to(exact), math.inf) for part in parts if part.numel()]
    largest = torch.stack(found).max() if found else torch.zeros((), dtype=exact, device=parts[0].device)
    mesh = gradients[0].device_mesh
    for dimension in range(mesh.ndim):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return largest
