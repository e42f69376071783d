"""Tensors that are spread over ranks: torch's DTensor, known without importing it."""

from __future__ import annotations

from typing import Any

import torch


def is_spread(value: Any) -> bool:
    """Return True for a DTensor: each rank has a part of it."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def whole_tensor(tensor: Any) -> torch.Tensor:
    """Return a tensor whole, without its gradient's history; of a spread tensor, all ranks call this together."""
    whole: torch.Tensor = tensor.detach()
    return whole.full_tensor() if is_spread(whole) else whole  # type: ignore[attr-defined]


def part_of_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, without the graph that `to_local()` makes."""
    part: torch.Tensor = getattr(gradient, "_local_tensor", gradient)
    return part


def has_values(gradient: torch.Tensor | None) -> bool:
    """Return True if a gradient, or of a sharded one this rank's part, is not all zeros."""
    return gradient is not None and bool(part_of_gradient(gradient).any())
