"""Gradients that torch's FSDP2 keeps in its own state, where `parameter.grad = None` does not reach them.

A backward that does not reduce leaves whole gradients there, and one that leaves out the all-reduce of HSDP leaves a
partial sum. Torch has no public way to see or drop them: `reset_iter_state()` of torch 2.13 keeps them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["drop_held", "has_held", "held_places", "hold_zeros", "parameter_groups", "trained_places"]


def parameter_groups(module: torch.nn.Module) -> Iterator[Any]:
    """Yield torch's states of the units of a sharded module."""
    for unit in module.modules():
        if hasattr(unit, "_get_fsdp_state"):
            state: Any = getattr(unit, "_get_fsdp_state")()  # noqa: B009 - for mypy, a module's attributes are tensors
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # Older torch has one at most, and None for a unit without parameters of its own.
                groups = filter(None, [state._fsdp_param_group])  # noqa: SLF001
            yield from groups


def has_held(groups: Iterable[Any]) -> bool:
    """Return True if gradients were computed that have not been reduced over all ranks."""
    return any(
        group._partial_reduce_output is not None or any(map(_is_held, group.fsdp_params))  # noqa: SLF001
        for group in groups
    )


def drop_held(groups: Iterable[Any]) -> None:
    """Drop these gradients."""
    for group in groups:
        group._partial_reduce_output = None  # noqa: SLF001
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
            if parameter.unsharded_accumulated_grad is not None:  # torch 2.15 reads this one from the one above.
                parameter.unsharded_accumulated_grad = None


def held_places(group: Any) -> list[int]:
    """Return the places of the parameters of a unit for which gradients are held."""
    return [place for place, parameter in enumerate(group.fsdp_params) if _is_held(parameter)]


def trained_places(group: Any) -> list[int]:
    """Return the places of the parameters of a unit that are trained."""
    return [place for place, parameter in enumerate(group.fsdp_params) if parameter.sharded_param.requires_grad]


def hold_zeros(group: Any) -> None:
    """Give zeros to the trained parameters of a unit for which no gradient is held, as if the loss did not change."""
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None and unsharded.requires_grad and not _is_held(parameter):
            unsharded.grad = torch.zeros_like(unsharded)


def _is_held(parameter: Any) -> bool:
    unsharded = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)
