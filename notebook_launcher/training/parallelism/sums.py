"""Sums in the place of means when sharded gradients are reduced on CPUs.

Up to torch 2.8, gloo's reduce-scatter takes AVG and returns the sum: gradients would be too large by the number of
ranks. FSDP2 can ask for sums and divide them itself, which gives the same numbers with every torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["reduce_by_sums", "sums_on_request"]


def sums_on_request() -> bool:
    """Return True if FSDP2 of this torch can be asked for sums, as it can since torch 2.8."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def reduce_by_sums(unit: torch.nn.Module) -> None:
    """Let FSDP2 reduce a unit's gradients by sums, and divide them itself."""
    sharded: Any = unit
    sharded.set_force_sum_reduction_for_comms(True)
