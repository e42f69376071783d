"""An open window: the gradients that each rank has gathered since the last update, and their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.accumulation.members.held_gradients import has_held, parameter_groups
from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.layouts.sharded import from_local_part, local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from notebook_launcher.training.checkpoints.training_state.stateful_objects import StatefulObjects

__all__ = ["capture_window", "merge_windows", "restore_window"]


def capture_window(stateful: StatefulObjects) -> dict[str, Any] | None:
    """Return this rank's part of the window, or None if none is open.

    Raises:
        CheckpointError: Torch holds gradients of a sharded model that it has not reduced, where they cannot be read.
    """
    if not stateful.gradient_state.has_open_window:
        return None
    if any(has_held(parameter_groups(model)) for model in stateful.models):
        raise CheckpointError(
            "save_state() inside a window cannot save a sharded model's gradients that are not reduced yet, because "
            "torch keeps them to itself (sync_each_batch=False, or replicas of a sharded model). Save where a window "
            "ends: if accelerator.sync_gradients: accelerator.save_state(...)."
        )
    gradients = {name: local_part(tensor.grad) for name, tensor in stateful.parameters() if tensor.grad is not None}
    return {"state": stateful.gradient_state.state_dict(), "gradients": gradients}


def merge_windows(windows: Sequence[dict[str, Any]], *, num_processes: int, nominal_divisor: bool) -> dict[str, Any]:
    """Return the part of a window for each of another number of ranks; all ranks get the same part.

    What is applied where the window ends stays the same. Where gradients are divided by what the window
    held, the ranks' gradients are added up in the end, so their sum is kept; where they are averaged over
    ranks, their mean.

    Args:
        windows: The parts of all ranks that saved.
        num_processes: Ranks that continue.
        nominal_divisor: True if gradients are averaged over ranks.
    """
    sums: dict[str, torch.Tensor] = {}
    for window in windows:
        for name, gradient in window["gradients"].items():
            wide = gradient.double() if gradient.is_floating_point() else gradient
            sums[name] = wide if name not in sums else sums[name] + wide
    shares = len(windows) if nominal_divisor else num_processes
    dtypes = {name: gradient.dtype for window in windows for name, gradient in window["gradients"].items()}
    state = dict(windows[0]["state"])
    state["windows"] = [
        {**counts, "weight": sum(window["state"]["windows"][at]["weight"] for window in windows) / num_processes}
        for at, counts in enumerate(state["windows"])
    ]
    return {"state": state, "gradients": {name: (sums[name] / shares).to(dtypes[name]) for name in sums}}


def restore_window(stateful: StatefulObjects, window: dict[str, Any] | None) -> None:
    """Restore the window; with None, close all windows and clear the gradients."""
    gradients = {} if window is None else window["gradients"]
    for name, tensor in stateful.parameters():
        gradient = gradients.get(name)
        tensor.grad = None if gradient is None else from_local_part(gradient.to(tensor.device, tensor.dtype), tensor)
    stateful.gradient_state.restore(None if window is None else window["state"])
