"""The weights that `backward` is given: numbers, and tensors that stay on their GPU.

A weight that a GPU has computed, such as the number of tokens that are not padding, is not read there: that would have
the program wait for all that is queued, once for each micro-batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.training.accumulation.members.member import Member

__all__ = ["as_total", "checked_weight", "has_sparse_gradients", "one_if_used", "stays_on_device"]


def stays_on_device(weight: Any, device: torch.device) -> bool:
    """Return True for a tensor of one element on the device, unless the device is the CPU, where a read is free."""
    return isinstance(weight, torch.Tensor) and weight.device.type == device.type != "cpu" and weight.numel() == 1


def checked_weight(weight: Any, device: torch.device, *, reads: bool = False) -> float | torch.Tensor:
    """Return a weight as a number, or as a tensor without dimensions where it stays on its device.

    On its device an invalid weight turns into NaN, and so do the gradients: an error would need a wait.

    Args:
        weight: The weight that the user gave.
        device: Device of this rank.
        reads: True if the result must be a number.

    Raises:
        TypeError: The weight is not a number.
        ValueError: The weight is negative, infinite or NaN.
    """
    if not reads and stays_on_device(weight, device):
        kept = weight.detach().reshape(()).double()
        return torch.where((kept >= 0.0) & (kept < math.inf), kept, math.nan)
    try:
        value = None if isinstance(weight, (str, bytes, bool)) else float(weight)
    except (TypeError, ValueError, RuntimeError):
        value = None
    if value is None:
        raise TypeError(
            f"weight={weight!r} is not a number. Pass the number of samples or tokens that the loss averages over."
        )
    if not 0.0 <= value < math.inf:
        raise ValueError(
            f"weight={weight!r} must be 0 or more: the number of samples or tokens that the loss averages over."
        )
    return value


def one_if_used(weight: float | torch.Tensor) -> float | torch.Tensor:
    """Return 1 for a weight above 0, and 0 for 0."""
    return (weight > 0).double() if isinstance(weight, torch.Tensor) else float(weight > 0)


def as_total(weight: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a weight, to which an all-reduce can add the weights of the other ranks."""
    if isinstance(weight, torch.Tensor):
        return weight.reshape(1).clone()
    return torch.full((1,), weight, dtype=torch.float64, device=device)  # `torch.tensor` waits for the GPU.


def has_sparse_gradients(members: Iterable[Member]) -> bool:
    """Return True if a layer of these members names rows in its gradients, as `Embedding(sparse=True)` does."""
    modules = (module for member in members for module in getattr(member, "module", torch.nn.Module()).modules())
    return any(getattr(module, "sparse", False) is True for module in modules)
