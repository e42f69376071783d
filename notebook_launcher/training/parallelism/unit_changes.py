"""Changes to a model before its units are sharded: tied units, checkpointing, precision of weights, outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["check_dtypes", "checkpoint_units", "keep_in_float32", "merge_tied", "return_own_tensors"]

Units = list[list[torch.nn.Module]]
"""Modules that are sharded together, inner ones first."""


def merge_tied(model: torch.nn.Module, units: Mapping[str, torch.nn.Module]) -> Units:
    """Return the units, merged where they share parameters: a parameter can be in one unit only.

    A unit that shares a parameter with what is in no unit, or with a unit around it, is left to the unit around it.
    """
    groups: dict[str, list[str]] = {name: [name] for name in units}
    for owners in _owners(model, units):
        names = {name for owner in owners for name in groups.get(owner, [owner])}
        if "" in names or any(_is_around(outer, inner) for outer in names for inner in names):
            for name in names:
                groups.pop(name, None)
        else:
            merged = [name for name in units if name in names]
            groups.update(dict.fromkeys(merged, merged))
    kept = [name for name in units if name in groups and groups[name][0] == name]
    return [[units[member] for member in groups[name]] for name in kept]


def _owners(model: torch.nn.Module, units: Mapping[str, torch.nn.Module]) -> list[set[str]]:
    """Return, for each parameter with several places, the innermost units around these; "" is the model."""
    found: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        around = next((unit for unit in units if name == unit or name.startswith(f"{unit}.")), "")
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), set()).add(around)
    return [owners for owners in found.values() if len(owners) > 1]


def _is_around(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.")


def checkpoint_units(model: torch.nn.Module, units: Units) -> Units:
    """Let each outermost unit keep its inputs alone and compute its activations again in the backward.

    Raises:
        ValueError: The model has no units.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if not units:
        raise ValueError(
            f"activation_checkpointing=True: {type(model).__name__} has no units, so all activations would be computed "
            "twice at once. Name its blocks: auto_wrap_policy='transformer_based_wrap' and "
            "transformer_cls_names_to_wrap=[...]."
        )
    inside = {id(module) for group in units for unit in group for module in unit.modules() if module is not unit}
    wrapped: dict[int, Any] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in inside or not any(child is unit for group in units for unit in group):
                continue
            if id(child) not in wrapped:
                wrapped[id(child)] = checkpoint_wrapper(child)
            setattr(parent, name, wrapped[id(child)])
    return [[wrapped.get(id(unit), unit) for unit in group] for group in units]


def check_dtypes(group: Iterable[torch.nn.Module], ignored: Collection[torch.nn.Parameter]) -> None:
    """Raise ValueError for a unit whose trained parameters differ in precision: FSDP2 reduces them in one buffer.

    Args:
        group: The modules of the unit. Parameters that are sharded already belong to inner units.
        ignored: Parameters that stay whole.
    """
    found: dict[torch.dtype, str] = {}
    for module in group:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in ignored and not hasattr(parameter, "full_tensor"):
                found.setdefault(parameter.dtype, f"{name or type(module).__name__} in {str(parameter.dtype)[6:]}")
    if len(found) > 1:
        first = next(iter(group))
        raise ValueError(
            f"prepare(): a unit ({type(first).__name__}) has trained parameters of several precisions: "
            f"{', '.join(found.values())}. Convert them to one, as model.float() does, and pass mixed_precision='bf16' "
            "to compute in another; or give each a unit of its own: auto_wrap_policy={...} with their classes."
        )


def keep_in_float32(model: torch.nn.Module) -> None:
    """Keep trained weights of lower precision in float32: updates are smaller than their rounding."""
    low = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16)
    ]
    for parameter in low:
        parameter.data = parameter.data.float()
    if low and torch.distributed.get_rank() == 0:
        warn_user(
            f"prepare(): {len(low)} trained parameters of {type(model).__name__} were in half precision. Their shards "
            "are kept in float32, and each unit computes in mixed_precision; to train in half precision alone, use "
            "mixed_precision='no'."
        )


def return_own_tensors(module: torch.nn.Module) -> None:
    """Let a unit, or a layer that is cut over ranks, return copies of views, so that they can be changed in place.

    `x = block(x); x += residual` trains a whole model. FSDP2 hangs a hook at what a unit returns, and a change in place
    of a view drops it: the backward fails, or finds no weights. What torch returns of a cut layer is a view as well.
    """
    module.register_forward_hook(_copy_views)


def _copy_views(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
    if not torch.is_grad_enabled() or not any(map(_is_trained_view, tree_leaves(output))):
        return None
    return tree_map_only(_is_trained_view, torch.clone, output)


def _is_trained_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value._is_view()  # noqa: SLF001 - torch has no other way to ask
