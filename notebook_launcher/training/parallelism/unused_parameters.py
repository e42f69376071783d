"""Gradients of parameters that one rank uses and another does not: FSDP2 reduces those alone that a rank has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.accumulation.members.held_gradients import hold_zeros, parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["reduce_unused"]


def reduce_unused(sharded: torch.nn.Module) -> None:
    """Let every rank reduce the gradients of all trained parameters of a unit, and give zeros for those not used."""
    model: Any = sharded
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
        return
    # Torch 2.11 has no such switch. Its hooks, too, look up this method on the object when a backward has passed.
    for group in parameter_groups(sharded):
        group.post_backward = functools.partial(_reduce_all, group, group.post_backward)


def _reduce_all(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    if group.reduce_grads:
        hold_zeros(group)
    post_backward(*unused)
