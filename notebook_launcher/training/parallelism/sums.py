"""Sums in the place of means when sharded gradients are reduced on CPUs.

Up to torch 2.8, gloo's reduce-scatter takes AVG and returns the sum: gradients would be too large by the number of
ranks. FSDP2 can ask for sums and divide them itself, which gives the same numbers with every torch.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_sums", "reduce_by_sums", "reduce_units_by_sums", "sums_on_request"]


def sums_on_request() -> bool:
    """Return True if FSDP2 of this torch can be asked for sums, as it can since torch 2.8."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def check_sums() -> None:
    """Raise `RuntimeError` if this torch cannot be asked for sums."""
    if not sums_on_request():
        raise RuntimeError(
            f"sharding on CPUs needs torch 2.8 or newer, and this is torch {torch.__version__}. "
            "Install a newer torch, or launch without sharding."
        )


def reduce_by_sums(unit: torch.nn.Module) -> None:
    """Let FSDP2 reduce a unit's gradients by sums, and divide them itself."""
    sharded: Any = unit
    sharded.set_force_sum_reduction_for_comms(True)


def reduce_units_by_sums(model: torch.nn.Module) -> None:
    """Do the same for all units of a model that the user's own code has sharded on CPUs.

    Raises:
        RuntimeError: This torch cannot be asked for sums.
    """
    from torch.distributed.fsdp import FSDPModule

    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    if units:
        check_sums()
    for unit in units:
        reduce_by_sums(unit)
