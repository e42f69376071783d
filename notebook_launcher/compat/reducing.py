"""`reduce` by Accelerate's rules."""

from __future__ import annotations

from typing import Any

from notebook_launcher.training import operations

__all__ = ["reduce"]


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:  # noqa: ARG001
    """Combine each tensor over all processes.

    Args:
        tensor: Nested tensors, of the same shapes and dtypes on all processes. They are not changed.
        reduction: `"mean"`, `"max"`, or anything else for the sum, `"none"` included, as in Accelerate.
        scale: Without effect: in Accelerate, it counts on XLA alone.

    Returns:
        The same structure with new tensors on every process.
    """
    return operations.reduce(tensor, reduction if reduction in ("mean", "max") else "sum")
