"""Sharded parameters in the place of the whole parameters that optimizers were made with, found by identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from notebook_launcher.training.spread_tensors import is_spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Replacements"]


class Replacements:
    """The sharded parameter of each parameter that was sharded."""

    def __init__(self) -> None:
        # Weakly, so that a whole parameter which no optimizer has any more is freed.
        self._sharded: Any = WeakIdKeyDictionary()

    def add(self, pairs: Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter]]) -> None:
        """Note the parameters before and after sharding."""
        for before, after in pairs:
            self._sharded[before] = after

    def has(self, parameter: torch.Tensor) -> bool:
        """Return True if a parameter was sharded."""
        return parameter in self._sharded

    def present(self, given: Any, *, trains: bool = False) -> Any:
        """Return given parameters with the sharded ones in place of whole ones that a list from before still holds.

        Args:
            given: A parameter, or several, also as pairs of a name and a parameter.
            trains: An optimizer is to train them: one that was unfrozen through the list is unfrozen.
        """

        def one(parameter: Any) -> Any:
            if not isinstance(parameter, torch.Tensor):
                return parameter  # torch names it in its error.
            after = self._sharded.get(parameter, parameter)
            return after.requires_grad_() if trains and parameter.requires_grad else after

        if not len(self._sharded) or isinstance(given, set):  # torch refuses a set, which has no order.
            return given
        if isinstance(given, torch.Tensor):
            return one(given)
        return [(each[0], one(each[1])) if isinstance(each, tuple) else one(each) for each in given]

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer update the sharded parameters; a state that it has already is shared out."""
        state: Any = optimizer.state
        for group in optimizer.param_groups:
            for at, before in enumerate(group["params"]):
                after = self._sharded.get(before)
                if after is None:
                    continue
                group["params"][at] = after
                if before in state:
                    state[after] = _spread(state.pop(before), before, after)
            _step_one_by_one_if_mixed(group)

    def __reduce__(self) -> tuple[type[Replacements], tuple[()]]:
        return Replacements, ()  # Ids of another process.


def _step_one_by_one_if_mixed(group: dict[str, Any]) -> None:
    """Let a group with whole and sharded parameters step without torch's multi-tensor functions, which refuse both."""
    kinds = {is_spread(parameter) for parameter in group["params"]}
    if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = False


def _spread(state: Mapping[str, Any], before: torch.Tensor, after: Any) -> dict[str, Any]:
    """Return the state of a parameter with every tensor of its shape shared out as the parameter is."""
    from torch.distributed.tensor import distribute_tensor

    def spread(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != before.shape:
            return value
        return distribute_tensor(value.to(after.device), after.device_mesh, after.placements)

    return {name: spread(value) for name, value in state.items()}
