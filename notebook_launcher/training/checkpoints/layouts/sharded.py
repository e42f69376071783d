"""Tensors that FSDP2 spreads over ranks: gathered whole one at a time, and cut into parts without communication."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.accumulation.members.targets import parameters_of
from notebook_launcher.training.spread_tensors import is_spread, whole_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "from_local_part",
    "gather_tree",
    "has_spread",
    "leaves",
    "local_part",
    "share_out",
    "share_out_state",
    "spread_like",
]


def has_spread(tree: Any) -> bool:
    """Return True if a tensor anywhere in nested dicts and lists is spread over ranks."""
    return any(is_spread(leaf) for leaf in leaves(tree))


def gather_tree(tree: Any, *, keep: bool) -> Any:
    """Return nested dicts and lists with every spread tensor whole, on the CPU; all ranks call it together.

    Args:
        tree: Of a state dict. Without spread tensors it comes back as it is, and no rank waits for another.
        keep: True if this rank wants the whole tensors; the others get None in their place.
    """
    if is_spread(tree):
        whole = whole_tensor(tree)
        return whole.cpu() if keep else None
    if not has_spread(tree):
        return tree
    if isinstance(tree, dict):
        return {name: gather_tree(value, keep=keep) for name, value in tree.items()}
    return type(tree)(gather_tree(value, keep=keep) for value in tree)


def leaves(tree: Any) -> Iterable[Any]:
    """Yield what nested dicts, lists and tuples hold, in their order."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def share_out(tensors: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors cut to this rank's parts: each as the tensor of the same name in `state` is spread."""
    return {name: spread_like(state[name], whole) if name in state else whole for name, whole in tensors.items()}


def share_out_state(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with its whole tensors spread as the parameters are."""
    spread = dict(state["state"])
    for at, parameter in enumerate(parameters_of(optimizer)):
        if is_spread(parameter) and at in spread:
            spread[at] = {name: spread_like(parameter, value) for name, value in spread[at].items()}
    return {**state, "state": spread}


def spread_like(model: Any, whole: Any) -> Any:
    """Return this rank's part of a whole tensor of the model's shape, in memory of its own; all else as it is.

    No rank waits for another, because every rank has the whole tensor, or its file in the address space.
    """
    if not is_spread(model) or not isinstance(whole, torch.Tensor) or whole.is_meta or whole.shape != model.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    options: dict[str, Any] = {}
    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:  # since torch 2.7
        options["src_data_rank"] = None
    part = distribute_tensor(whole, model.device_mesh, model.placements, **options).to_local()
    return from_local_part(part.to(model.device, copy=True), model)


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
