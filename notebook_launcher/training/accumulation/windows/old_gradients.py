"""Gradients that parameters have before the first backward of a window.

An optimizer that steps in every second window only leaves them, as do an update without `zero_grad()` and another
model's loss. As with torch alone, the window's gradients are added to them. The window's correction leaves them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.training.accumulation.members.targets import parameters_of
from notebook_launcher.training.accumulation.windows.windows import has_values
from notebook_launcher.training.spread_tensors import part_of_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from notebook_launcher.training.accumulation.members.members import Members
    from notebook_launcher.training.accumulation.windows.windows import Window

__all__ = ["keep_old_gradients"]


def keep_old_gradients(window: Window, members: Members, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Copy the gradients that are there before a window's first backward, for its correction, if there are any."""
    if not any(_may_count(probe.grad, window) for probe in _probes(window, members, optimizers)):
        return
    for member in members.models_and_leaves:  # Any of them may join the window.
        for parameter in member.parameters():
            if parameter.grad is not None:
                window.old_gradients[id(parameter)] = part_of_gradient(parameter.grad).detach().clone()


def _may_count(gradient: torch.Tensor | None, window: Window) -> bool:
    """Return True unless a gradient is missing or known to be all zeros."""
    if gradient is None or window.num_steps > 1 or gradient.device.type == "cpu":
        return has_values(gradient)
    return True  # Reading it would make every update wait for the GPU.


def _probes(window: Window, members: Members, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return a trained parameter of each member and each optimizer whose gradients the window gathers.

    A sharded parameter of which this rank has no part shows nothing.
    """
    known = members.looked_up.probes
    probes = known.get(id(window))
    if probes is None:
        mine = [list(member.parameters()) for member in window.members or members.models_and_leaves]
        trained = {
            id(parameter)
            for parameters in mine
            for parameter in parameters
            if parameter.requires_grad and part_of_gradient(parameter).numel()
        }
        firsts = [
            next((parameter for parameter in parameters if id(parameter) in trained), None)
            for parameters in (*mine, *map(parameters_of, optimizers))
        ]
        probes = known[id(window)] = list({id(first): first for first in firsts if first is not None}.values())
    return probes
