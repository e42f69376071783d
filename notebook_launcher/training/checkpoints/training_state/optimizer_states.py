"""States of optimizers in two parts: the spread tensors by their parameters' names, and all else.

An optimizer numbers its parameters. In the sharded layout, its tensors have the names of the parameters, as
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` gives them. That function itself is not called,
because it steps an optimizer that has no state yet, and Adam's count of steps would begin with 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.accumulation.members.targets import parameters_of
from notebook_launcher.training.spread_tensors import is_spread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.training.checkpoints.training_state.stateful_objects import StatefulObjects

__all__ = ["join_state", "parameter_names", "split_state", "tensor_names"]

STORED = "stored_as"
"""Key of the entry that stands for a tensor which is in the folder of the sharded layout."""


def parameter_names(stateful: StatefulObjects) -> dict[int, str]:
    """Return the name of each parameter by its `id`; with one model, they are the model's own names."""
    alone = len(stateful.models) == 1 and not stateful.leaves
    return {id(tensor): name.partition(".")[2] if alone else name for name, tensor in stateful.parameters()}


def split_state(optimizer: Any, state: Mapping[str, Any], names: Mapping[int, str]) -> tuple[dict[str, Any], Any]:
    """Return an optimizer's state with a reference in place of each spread tensor, and these tensors by name."""
    parameters = parameters_of(optimizer)
    tensors: dict[str, torch.Tensor] = {}

    def split(value: Any, name: str) -> Any:
        if is_spread(value):
            tensors[name] = value.detach()
            return {STORED: name}
        return {key: split(item, f"{name}.{key}") for key, item in value.items()} if isinstance(value, dict) else value

    slots = {
        at: split(slot, f"state.{names.get(id(parameters[at]), at)}" if isinstance(at, int) else f"state.{at}")
        for at, slot in state["state"].items()
    }
    return {**state, "state": slots}, tensors


def tensor_names(state: Any) -> set[str]:
    """Return the names of the tensors that a state refers to."""
    if not isinstance(state, dict):
        return set()
    if set(state) == {STORED}:
        return {state[STORED]}
    return {name for value in state.values() for name in tensor_names(value)}


def join_state(
    optimizer: Any, state: Mapping[str, Any], outline: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a state with an empty tensor in place of each reference, and these tensors by name, to be filled.

    Args:
        optimizer: Its parameters show how tensors of their shape are spread.
        state: From `split_state`.
        outline: Tensors on the meta device, for shapes and dtypes.
    """
    parameters = parameters_of(optimizer)
    tensors: dict[str, torch.Tensor] = {}

    def join(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, dict):
            return value
        if set(value) != {STORED}:
            return {key: join(item, parameter) for key, item in value.items()}
        shape = outline[value[STORED]]
        is_alike = is_spread(parameter) and parameter.shape == shape.shape
        made = (
            torch.empty_like(parameter.detach(), dtype=shape.dtype)
            if is_alike
            else torch.empty(shape.shape, dtype=shape.dtype)
        )
        return tensors.setdefault(value[STORED], made)

    slots = {
        at: join(slot, parameters[at] if isinstance(at, int) else torch.empty(0)) for at, slot in state["state"].items()
    }
    return {**state, "state": slots}, tensors
