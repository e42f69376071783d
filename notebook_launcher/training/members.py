"""What is trained together: the prepared models and leaf tensors, and which optimizer has whose parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from notebook_launcher.training.models import LeafTensor, SyncedModel

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Member", "Members"]

Member: TypeAlias = "torch.nn.Module | LeafTensor"


class Members:
    """The models and leaf tensors that `prepare` was given."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        """As prepared."""
        self.leaves: list[LeafTensor] = []
        self._owners: dict[int, list[Member]] = {}

    def find(self, targets: Iterable[Any]) -> list[Member]:
        """Return what the arguments of `accumulate` stand for; none stand for everything."""
        targets = tuple(targets)
        if not targets:
            return [*self.models, *self.leaves]
        found: list[Member] = []
        for target in targets:
            if isinstance(target, torch.Tensor):
                found += [leaf for leaf in self.leaves if leaf.tensor is target]
            elif isinstance(target, torch.nn.Module):
                found.append(target)
            else:
                raise TypeError(
                    f"accumulate({type(target).__name__}): it takes the models, or the leaf tensors, that prepare() "
                    "returned."
                )
        return found

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[Member]:
        """Return the members with parameters that the optimizer updates."""
        key = id(optimizer)
        if key not in self._owners:
            mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            everybody: list[Member] = [*self.models, *self.leaves]
            self._owners[key] = [
                member for member in everybody if any(id(parameter) in mine for parameter in member.parameters())
            ]
        return self._owners[key]

    def add_model(self, model: Any) -> None:
        """Take in a prepared model."""
        self.models.append(model)
        self._owners.clear()

    def add_leaf(self, tensor: torch.Tensor) -> LeafTensor:
        """Take in a leaf tensor."""
        leaf = LeafTensor(tensor)
        self.leaves.append(leaf)
        self._owners.clear()
        return leaf

    def forget_owners(self) -> None:
        """Look anew who updates what: an optimizer was given other parameters."""
        self._owners.clear()

    def clear(self) -> None:
        """Let go of everything."""
        self.models.clear()
        self.leaves.clear()
        self._owners.clear()

    @property
    def synced_models(self) -> list[SyncedModel]:
        """The models that DDP synchronises."""
        return [model for model in self.models if isinstance(model, SyncedModel)]
