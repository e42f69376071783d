"""Reduction of optimizers that keeps what torch's own pickling drops: their hooks, and the mark of a scheduler.

A scheduler replaces `step` of its optimizer by a function that records each call, and at its own first step warns if
`step` is another function. Pickle rebuilds the optimizer with the method of its class.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["reduce_optimizer"]

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
STEPPED = "_opt_called"
"""The mark that is set by the function with which a scheduler replaces `step`."""


def reduce_optimizer(obj: Any) -> tuple[Any, ...] | None:
    """Return the reduction of an optimizer; None for other objects, and if pickle alone drops nothing."""
    torch = sys.modules.get("torch.optim")
    if torch is None or not isinstance(obj, torch.Optimizer):
        return None
    dropped = {name: vars(obj)[name] for name in (*HOOKS, STEPPED) if vars(obj).get(name)}
    scheduled = hasattr(obj.step, "_wrapped_by_lr_sched")
    if not (dropped or scheduled):
        return None
    if any({"__reduce__", "__reduce_ex__"} & vars(base).keys() for base in type(obj).__mro__[:-1]):
        return None  # its class decides what travels
    rebuild, args, state, *_ = obj.__reduce_ex__(5)
    return rebuild, args, (state, dropped, scheduled), None, None, _restore


def _restore(optimizer: Any, state: tuple[Any, dict[str, Any], bool]) -> None:
    own, dropped, scheduled = state
    optimizer.__setstate__(own)
    vars(optimizer).update(dropped)
    _reserve([number for hooks in dropped.values() if isinstance(hooks, dict) for number in hooks])
    if scheduled:
        _mark_as_scheduled(optimizer)


def _reserve(numbers: list[int]) -> None:
    """Give later hooks other numbers than these: a hook with one of these numbers would replace an earlier hook."""
    from torch.utils.hooks import RemovableHandle

    RemovableHandle.next_id = max([RemovableHandle.next_id, *(number + 1 for number in numbers)])


def _mark_as_scheduled(optimizer: Any) -> None:
    from torch.optim.lr_scheduler import LRScheduler

    class Mark(LRScheduler):
        """A scheduler that replaces `step` of its optimizer, and leaves learning rates alone."""

        def _initial_step(self) -> None:
            pass

    Mark(optimizer)
