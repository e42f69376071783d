"""Checks of the arguments of `Accelerator.prepare`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from notebook_launcher.training.accumulation.updates.scheduler import AcceleratedScheduler
from notebook_launcher.training.argument_checks import check_switch
from notebook_launcher.wording.text import type_of

__all__ = ["check_objects", "check_placements", "is_scheduler"]

_PREPARED_KINDS = (torch.nn.Module, torch.optim.Optimizer, DataLoader)


def check_placements(device_placement: Any, number: int) -> list[bool | None]:
    """Return the placement of each object; raise ValueError if their numbers differ."""
    if device_placement is None:
        return [None] * number
    if not isinstance(device_placement, (list, tuple)):
        raise TypeError(
            f"device_placement={device_placement!r} is {type_of(device_placement)}; it must be a list with True or "
            "False for each object. For all objects, pass Accelerator(device_placement=...)."
        )
    if len(device_placement) != number:
        raise ValueError(
            f"device_placement has {len(device_placement)} entries for {number} objects. Pass True or False for each "
            "object, or omit device_placement."
        )
    for placed in device_placement:
        check_switch("device_placement", placed, or_none=True)
    return list(device_placement)


def check_objects(args: tuple[Any, ...]) -> None:
    """Raise for objects that `prepare` would return unprepared, although they look like objects that it prepares."""
    for obj in args:
        held = list(obj.values()) if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else ()
        found = next((each for each in held if _can_be_prepared(each)), None)
        if found is not None:
            raise TypeError(
                f"prepare() got {type_of(obj)} that holds {type_of(found)}, and would return it unprepared. Pass the "
                "objects one by one: prepare(*objects)."
            )
        if isinstance(obj, type) and issubclass(obj, _PREPARED_KINDS):
            raise TypeError(f"prepare() got the class {obj.__name__}. Pass an object of it: {obj.__name__}(...).")
        if isinstance(obj, torch.Tensor) and obj.requires_grad and not obj.is_leaf:
            raise ValueError(
                f"prepare() got a tensor that was computed ({type(obj.grad_fn).__name__}); gradients gather in leaf "
                "tensors only. Pass the tensor that it was computed from, or tensor.detach().requires_grad_()."
            )


def _can_be_prepared(obj: Any) -> bool:
    return isinstance(obj, _PREPARED_KINDS) or is_scheduler(obj)


def is_scheduler(obj: Any) -> bool:
    """Return True for a learning-rate scheduler, prepared or not."""
    return isinstance(obj, (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler))
