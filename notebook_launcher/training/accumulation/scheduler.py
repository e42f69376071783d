"""A learning-rate scheduler that advances once for each update, and the rates that it will give."""

from __future__ import annotations

import copy
import types
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.user_warnings import Warner
from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from notebook_launcher.training.accumulation.gradient_state import GradientState
    from notebook_launcher.training.accumulation.optimizer import AcceleratedOptimizer


PLANNED = ("total_steps", "T_max", "total_iters")
"""Attributes of schedulers that give the number of their steps."""
FEW = 100
"""Updates of a preview if the scheduler does not say how many it is made for."""


class AcceleratedScheduler:
    """A prepared scheduler: `step()` advances it if an update was made, and only then.

    Args:
        scheduler: A torch scheduler, or anything with `step()`.
        optimizers: The optimizers whose updates it follows: its own, or all.
        step_with_optimizer: False: every `step()` advances it.
        steps_per_update: 1; Accelerate's number of processes in `compat`.
        gradient_state: Knows if a micro-batch is the last of its window.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[AcceleratedOptimizer],
        *,
        step_with_optimizer: bool = True,
        steps_per_update: int = 1,
        gradient_state: GradientState | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.step_with_optimizer = step_with_optimizer
        self.steps_per_update = steps_per_update
        self.gradient_state = gradient_state
        self._warn_once = Warner()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the window has ended and its update was not skipped for an overflow."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if self.gradient_state is not None and not self.gradient_state.sync_gradients:
            if self.gradient_state.has_left_window:
                self._warn_once(
                    "left window",
                    "scheduler.step() did not advance: the loop was left inside a window of micro-batches, and a "
                    "prepared scheduler takes a step for each update. Leave the loop where accelerator.sync_gradients "
                    "is True; or, for a step at the end of each epoch whatever was left, give "
                    "Accelerator(step_scheduler_with_optimizer=False).",
                )
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        _advance(self.scheduler, self.steps_per_update, *args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step, one for each parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Another process has no window to wait for.
        return {**self.__dict__, "gradient_state": None}

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _advance(scheduler: Any, steps: int, *args: Any, **kwargs: Any) -> None:
    for _ in range(steps):
        # Short windows make more updates than planned, and OneCycleLR refuses to go past its end.
        if getattr(scheduler, "_step_count", 0) <= getattr(scheduler, "total_steps", float("inf")):
            scheduler.step(*args, **kwargs)


def preview(scheduler: Any, updates: int | None, group: int, *, steps_per_update: int) -> list[float]:
    """Carry out `Accelerator.preview` with a copy of the scheduler, which a copy of the optimizer's rates follows."""
    name, optimizer = type(scheduler).__name__, getattr(scheduler, "optimizer", None)
    if not hasattr(optimizer, "param_groups") or not hasattr(scheduler, "get_last_lr"):
        raise TypeError(f"preview({name}): pass a scheduler of torch.optim.lr_scheduler, prepared or not.")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(f"preview({name}): its rates follow a metric of the training, so nobody knows them before.")
    if updates is None:
        left = [getattr(scheduler, planned, None) for planned in PLANNED]
        updates = next((number for number in left if isinstance(number, int) and number > 0), FEW)
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 1:
        raise ValueError(f"preview(updates={updates!r}): the number of updates must be a whole number, at least 1.")
    rates = _Rates(optimizer)
    if not 0 <= group < len(rates.param_groups):
        raise ValueError(
            f"preview(group={group!r}): the optimizer has {plural(len(rates.param_groups), 'parameter group')}."
        )
    # What a user's schedule refers to, such as the model, stays as it is.
    kept = {id(optimizer): rates, **{id(method): method for method in _methods_of(scheduler)}}
    follower, found = copy.deepcopy(scheduler, kept), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of a scheduler that steps without its optimizer.
        for _ in range(updates):
            found.append(float(rates.param_groups[group]["lr"]))
            _advance(follower, steps_per_update)
    return found


def _methods_of(scheduler: Any) -> list[Any]:
    """Return the methods, of objects of any kind, by which a scheduler computes its rates."""
    held = [value if isinstance(value, (list, tuple)) else [value] for value in vars(scheduler).values()]
    inner = [_methods_of(other) for other in getattr(scheduler, "_schedulers", ())]
    return [each for values in (*held, *inner) for each in values if isinstance(each, (types.MethodType, weakref.ref))]


class _Rates:
    """The parameter groups of an optimizer without its parameters and its state, for a scheduler to write into."""

    def __init__(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        self.param_groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups
        ]
        self.defaults = dict(optimizer.defaults)

    def step(self) -> None:
        """Do nothing; schedulers look whether it is there."""
