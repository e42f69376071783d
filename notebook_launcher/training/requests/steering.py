"""Settings that change during the training: learning rate, clipping, accumulation, and what the user offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.context import current, notify
from notebook_launcher.settings.changes import ACCELERATOR_SETTINGS, apply_change

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.settings.changes import Wanted
    from notebook_launcher.training.accumulation.updates.updates import Updates
    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState
    from notebook_launcher.training.prepared import Prepared

__all__ = ["Steering", "scale_rates"]

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Entries of a parameter group that are learning rates."""
SCHEDULER_RATES = ("base_lrs", "max_lrs", "_last_lr")
"""Attributes of schedulers that list a learning rate for each parameter group."""


class Steering:
    """The settings of an Accelerator that a run changes, and how.

    Args:
        prepared: The optimizers and schedulers, with the learning rates.
        updates: Clips gradients.
        gradient_state: Counts micro-batches.
    """

    def __init__(self, prepared: Prepared, updates: Updates, gradient_state: GradientState) -> None:
        self._prepared = prepared
        self._updates = updates
        self._gradient_state = gradient_state

    @property
    def has_open_window(self) -> bool:
        """True if gradients have been gathered that no update has used: settings change between two windows."""
        return self._gradient_state.has_open_window

    def settings(self) -> dict[str, float | None]:
        """Return the values of the settings by name, without values that only a GPU knows."""
        settings: dict[str, float | None] = {}
        for prepared in self._prepared.optimizers[:1]:
            rate = prepared.optimizer.param_groups[0]["lr"]
            if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu":  # A read would wait for the GPU.
                settings["lr"] = float(rate)
        settings["max_grad_norm"] = self._updates.max_grad_norm
        settings["gradient_accumulation_steps"] = self._gradient_state.num_steps
        return settings

    def change(self, wanted: Mapping[str, Wanted]) -> dict[str, tuple[Any, Any]]:
        """Change settings of the Accelerator and of the user; return the values before and after, by name."""
        own = {
            "lr": self._change_rate,
            "max_grad_norm": self._change_norm,
            "gradient_accumulation_steps": self._change_steps,
        }
        return {
            name: own[name](value) if name in ACCELERATOR_SETTINGS else _change_tunable(name, value)
            for name, value in wanted.items()
        }

    def _change_rate(self, wanted: Wanted) -> tuple[Any, Any]:
        optimizers = [prepared.optimizer for prepared in self._prepared.optimizers]
        schedulers = [prepared.scheduler for prepared in self._prepared.schedulers]
        if not optimizers:
            return None, None
        before = float(optimizers[0].param_groups[0]["lr"])
        for optimizer in optimizers:
            own = float(optimizer.param_groups[0]["lr"])
            own_schedulers = [
                scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer
            ]
            if own:
                scale_rates(optimizer, own_schedulers, apply_change(own, wanted) / own)
            elif isinstance(wanted, str) or own_schedulers:
                _note_unchanged(wanted)
            else:
                _set_rates(optimizer, apply_change(own, wanted))
        return before, float(optimizers[0].param_groups[0]["lr"])

    def _change_norm(self, wanted: Wanted) -> tuple[Any, Any]:
        before = self._updates.max_grad_norm
        if before is None and isinstance(wanted, str):
            notify(
                f"max_grad_norm={wanted!r} changed nothing: gradients are not clipped, so nothing can be multiplied. "
                "Set a number, such as 1.0."
            )
        else:
            self._updates.max_grad_norm = None if wanted is None else apply_change(before or 0.0, wanted)
        return before, self._updates.max_grad_norm

    def _change_steps(self, wanted: Wanted) -> tuple[Any, Any]:
        before = self._gradient_state.num_steps
        self._gradient_state.num_steps = wanted
        return before, self._gradient_state.num_steps


def _note_unchanged(wanted: Wanted) -> None:
    notify(
        f"lr={wanted!r} changed nothing: the rate is 0 at this update, as at the start of a warm-up, and no factor "
        "changes that. Ask again after the next update."
    )


def _set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def scale_rates(optimizer: torch.optim.Optimizer, schedulers: list[Any], factor: float) -> None:
    """Multiply the learning rates of all parameter groups, and what their schedulers compute them from.

    So the curve of a schedule keeps its shape, and groups keep the ratios of their rates.
    """
    for group in optimizer.param_groups:
        for name in GROUP_RATES:
            if isinstance(group.get(name), torch.Tensor):
                group[name].mul_(factor)
            elif name in group:
                group[name] *= factor
    for scheduler in schedulers:
        _scale_scheduler(scheduler, factor)


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    for name in SCHEDULER_RATES:
        if isinstance(rates := getattr(scheduler, name, None), list):
            setattr(scheduler, name, [rate * factor for rate in rates])
    for inner in getattr(scheduler, "_schedulers", ()):  # Of ChainedScheduler and SequentialLR.
        _scale_scheduler(inner, factor)


def _change_tunable(name: str, wanted: Wanted) -> tuple[Any, Any]:
    context = current()
    assert context is not None
    before = context.tunables.get(name)
    if before is not None:
        context.tunables[name] = type(before)(apply_change(before, wanted))
    elif not isinstance(wanted, str):  # This rank has not read the setting yet, so a factor has nothing to multiply.
        context.tunables[name] = apply_change(0.0, wanted)
    return before, context.tunables.get(name)
