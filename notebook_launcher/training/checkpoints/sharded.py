"""Tensors that FSDP2 spreads over ranks; a checkpoint has them whole, so that any number of ranks can load it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["from_local_part", "gather_tree", "is_spread", "local_part", "share_out", "share_out_state"]


def is_spread(value: Any) -> bool:
    """Return True for a tensor of which each rank has a part, a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def gather_tree(tree: Any, *, keep: bool) -> Any:
    """Return nested dicts and lists with every spread tensor whole, on the CPU; all ranks call it together.

    Args:
        tree: Of a state dict. Without spread tensors it comes back as it is, and no rank waits for another.
        keep: True if this rank wants the whole tensors; the others get None in their place.
    """
    if is_spread(tree):
        whole = tree.full_tensor()
        return whole.cpu() if keep else None
    if not any(is_spread(leaf) for leaf in _leaves(tree)):
        return tree
    if isinstance(tree, dict):
        return {name: gather_tree(value, keep=keep) for name, value in tree.items()}
    return type(tree)(gather_tree(value, keep=keep) for value in tree)


def _leaves(tree: Any) -> Iterable[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def share_out(tensors: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return whole tensors, spread like the tensors of a model's state dict; all ranks call this together."""
    return {name: _spread_like(state[name], whole) if name in state else whole for name, whole in tensors.items()}


def share_out_state(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with its whole tensors spread as the parameters are; all ranks call it together."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spread = dict(state["state"])
    for at, parameter in enumerate(parameters):
        if is_spread(parameter) and at in spread:
            spread[at] = {name: _spread_like(parameter, value) for name, value in spread[at].items()}
    return {**state, "state": spread}


def _spread_like(model: Any, whole: Any) -> Any:
    if not is_spread(model) or not isinstance(whole, torch.Tensor) or whole.shape != model.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(model.device), model.device_mesh, model.placements)


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if is_spread(tensor) else tensor
    return part


def from_local_part(part: torch.Tensor, model: Any) -> torch.Tensor:
    """Return the tensor that a rank's part belongs to, spread as `model` is."""
    if not is_spread(model):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
