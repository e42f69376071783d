"""The units of a sharded model: modules whose parameters are gathered, used and freed together."""

from __future__ import annotations

import collections
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin


Modules = dict[str, torch.nn.Module]


def find_ignored(model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin) -> set[torch.nn.Parameter]:
    """Return the parameters of the modules that stay whole on each rank, and those without dimensions to cut.

    Raises:
        ValueError: A pattern matches no name.
    """
    wanted, scalars = plugin.ignored_modules, {parameter for parameter in model.parameters() if not parameter.ndim}
    if wanted is None:
        return scalars
    if isinstance(wanted, str):
        chosen = [module for name, module in model.named_modules() if re.fullmatch(wanted, name)]
        if not chosen:
            raise ValueError(f"ignored_modules={wanted!r} matches the name of no module in {type(model).__name__}.")
    else:
        chosen = [wanted] if isinstance(wanted, torch.nn.Module) else list(wanted)
    return scalars | {parameter for module in chosen for parameter in module.parameters()}


def find_units(
    model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin, ignored: set[torch.nn.Parameter]
) -> Modules:
    """Return the units inside a model by name, inner ones first; the model itself, the outermost, is not among them.

    Raises:
        ValueError: A class that `transformer_cls_names_to_wrap` names is not in the model.
    """
    chosen = _choose(model, plugin)
    found = {
        name: module
        for name, module in model.named_modules()
        if name and id(module) in chosen and any(parameter not in ignored for parameter in module.parameters())
    }
    return dict(reversed(found.items()))


def _choose(model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin) -> set[int]:
    policy = plugin.auto_wrap_policy
    if policy == "NO_WRAP":
        return set()
    if policy == "SIZE_BASED_WRAP":
        return _by_size(model, plugin.min_num_params or 0)
    if policy == "TRANSFORMER_BASED_WRAP" or (policy is None and _no_split(model)):
        return _by_class_name(model, plugin.transformer_cls_names_to_wrap or _no_split(model))
    if policy is None:
        return _repeated_blocks(model)
    if isinstance(policy, (set, frozenset, list, tuple)):
        return {id(module) for module in model.modules() if isinstance(module, tuple(policy))}
    return _by_policy(model, policy)


def _no_split(model: torch.nn.Module) -> list[str]:
    return [*(getattr(model, "_no_split_modules", None) or ())]


def _by_class_name(model: torch.nn.Module, names: list[str]) -> set[int]:
    known = {type(module).__name__ for module in model.modules()}
    if not names:
        raise ValueError(
            f"auto_wrap_policy='transformer_based_wrap': {type(model).__name__} has no _no_split_modules. Write "
            f"transformer_cls_names_to_wrap=[...] with names out of {', '.join(sorted(known))}."
        )
    # Of the classes that a model lists, one that it did not build is left out; a user's own list must be right.
    missing = [name for name in names if name not in known]
    if len(missing) == len(names) or (missing and names is not _no_split(model) and names != _no_split(model)):
        raise ValueError(
            f"transformer_cls_names_to_wrap: {type(model).__name__} contains no {', '.join(missing)}. It contains "
            f"{', '.join(sorted(known))}."
        )
    return {id(module) for module in model.modules() if type(module).__name__ in names}


def _by_size(model: torch.nn.Module, fewest: int) -> set[int]:
    """Return modules with at least so many parameters that are in no smaller unit, as torch's policy does."""
    chosen: set[int] = set()

    def visit(module: torch.nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        left = own + sum(visit(child) for child in module.children())
        if fewest and left >= fewest and module is not model and not _is_container(module):
            chosen.add(id(module))
            return 0
        return left

    visit(model)
    return chosen


def _is_container(module: torch.nn.Module) -> bool:
    """Return True for a module that is never called, so that it cannot gather its parameters."""
    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))


def _repeated_blocks(model: torch.nn.Module) -> set[int]:
    """Return the modules whose class occurs several times in a `ModuleList` or `Sequential`, the outermost alone."""
    chosen: set[int] = set()
    pending = collections.deque([model])
    while pending:
        module = pending.popleft()
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        repeated: set[type] = set()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            counts = collections.Counter(type(child) for child in children)
            repeated = {kind for kind, count in counts.items() if count > 1}
        for child in children:
            if type(child) in repeated and not _is_container(child):
                chosen.add(id(child))
            else:
                pending.append(child)
    return chosen


def _by_policy(model: torch.nn.Module, policy: Any) -> set[int]:
    """Return what one of torch's policies chooses, an object of `torch.distributed.fsdp.wrap` or a function."""
    if hasattr(policy, "_run_policy"):
        return {id(module) for module in policy._run_policy(model, ignored_modules=set(), root_kwargs={})}  # noqa: SLF001 - torch has no public way
    takes_module_alone = len(inspect.signature(policy).parameters) == 1

    def decide(module: torch.nn.Module) -> bool:
        if takes_module_alone:
            return bool(policy(module))
        numel = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=numel))

    inside = (module for module in model.modules() if module is not model and not _is_container(module))
    return {id(module) for module in inside if decide(module)}


# --------------------------------------------------------------------------------------------------------------------
# Changes to a model before its units are sharded: tied units, checkpointing, precision of weights, outputs.


Units = list[list[torch.nn.Module]]
"""Modules that are sharded together, inner ones first."""


def places_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Return every parameter with the module that has it and its name there, a tied one once for each of its places."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()  # noqa: SLF001 - `named_parameters` leaves duplicates out
        if parameter is not None
    ]


def merge_tied(model: torch.nn.Module, units: Mapping[str, torch.nn.Module]) -> Units:
    """Return the units, merged where they share parameters: a parameter can be in one unit only.

    A unit that shares a parameter with what is in no unit, or with a unit around it, is left to the unit around it.
    """
    groups: dict[str, list[str]] = {name: [name] for name in units}
    for owners in _owners(model, units):
        names = {name for owner in owners for name in groups.get(owner, [owner])}
        if "" in names or any(inner.startswith(f"{outer}.") for outer in names for inner in names):
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


def checkpoint_units(model: torch.nn.Module, units: Units) -> Units:
    """Let each outermost unit keep its inputs alone and compute its activations again in the backward."""
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
