"""Resolve the arguments of `accumulate` and `no_sync` to prepared members, by the parameters in them.

Users pass the prepared model, a compiled or containing module, `model.module`, the
name from before `prepare`, a list. All of these hold the parameters of a prepared model, so parameters decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.accumulation.member_kinds import synchronises_itself

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher.training.accumulation.member_kinds import Member
    from notebook_launcher.training.accumulation.members import Members

__all__ = ["flatten", "parameters_of", "resolve"]


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


def resolve(target: Any, members: Members) -> list[Member]:
    """Return the members that hold a target's parameters; an empty list if it has none of a member's.

    Modules inside the target that `prepare` returned are found first. Parameters that are left over then belong
    to the member that holds most of them, and so on.

    Args:
        target: A module, a tensor, an optimizer, or any object with `parameters()`.
        members: Models and tensors to search. Modules that synchronise their own gradients (`fully_shard`,
            DistributedDataParallel) and whose optimizer was prepared are added to it.

    Raises:
        TypeError: The target has no parameters to look at.
    """
    found = list(_prepared_inside(target, members)) if isinstance(target, torch.nn.Module) else []
    left = {id(parameter) for parameter in parameters_of(target)}
    left.difference_update(id(parameter) for member in found for parameter in member.parameters())
    others = [(member, {id(parameter) for parameter in member.parameters()}) for member in members.models_and_leaves]
    while left:
        member, held = max(others, key=lambda pair: len(left & pair[1]), default=(None, set()))
        if member is None or left.isdisjoint(held):
            break
        found.append(member)
        left -= held
    return found


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


def _prepared_inside(module: torch.nn.Module, members: Members) -> Iterator[Member]:
    """Yield the members among a module and its submodules, the outermost of each branch."""
    pending, seen = [module], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        member = members.by_module(one)
        if member is None and synchronises_itself(one) and members.owns_any(one.parameters()):
            member = members.adopt(one)
        if member is None:
            pending.extend(reversed(list(one.children())))
        else:
            yield member
