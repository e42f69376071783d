"""The arguments of `accumulate` and `no_sync`, and the parameters in them, by which `Members` finds its members.

Users pass the prepared model, a compiled or containing module, `model.module`, the
name from before `prepare`, a list. All of these hold the parameters of a prepared model, so parameters decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["flatten", "parameters_of"]


def flatten(targets: Iterable[Any]) -> tuple[Any, ...]:
    """Return the targets with lists, tuples, sets and mappings replaced by their elements."""
    flat: list[Any] = []
    for target in targets:
        if isinstance(target, Mapping):
            flat += flatten(target.values())
        elif isinstance(target, (list, tuple, set, frozenset)):
            flat += flatten(target)
        else:
            flat.append(target)
    return tuple(flat)


def parameters_of(target: Any) -> list[torch.Tensor]:
    """Return the parameters in a target, each once; raise TypeError for an object that has none by nature."""
    if isinstance(target, torch.Tensor):
        return [target]
    if isinstance(target, torch.optim.Optimizer):
        return [parameter for group in target.param_groups for parameter in group["params"]]
    if callable(getattr(target, "parameters", None)):
        return list(target.parameters())
    raise TypeError(
        f"accumulate({type(target).__name__}): expected the models, or the leaf tensors, that prepare() returned, or "
        "objects that contain their parameters."
    )
