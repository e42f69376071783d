"""What is trained together: the prepared models and leaf tensors, and which optimizer has whose parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from notebook_launcher.training.models import FORWARD_SYNCED, LeafTensor, SyncedModel, synced_part

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
        self.synced_models: list[SyncedModel] = []
        """Those that DDP synchronises, without what compiled them."""
        self._owners: dict[int, list[Member]] = {}

    def find(self, targets: Iterable[Any]) -> list[Member]:
        """Return what the arguments of `accumulate` stand for; none stand for everything."""
        targets = tuple(targets)
        if not targets:
            return self.everybody
        found: list[Member] = []
        for target in targets:
            if isinstance(target, torch.Tensor):
                found += [leaf for leaf in self.leaves if leaf.tensor is target]
            elif isinstance(target, torch.nn.Module):
                found.append(synced_part(target))
            else:
                raise TypeError(
                    f"accumulate({type(target).__name__}): it takes the models, or the leaf tensors, that prepare() "
                    "returned."
                )
        return found

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[Member]:
        """Return the members with parameters that the optimizer updates."""
        owned = self._owners.get(id(optimizer))
        if owned is None:
            mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            owned = self._owners[id(optimizer)] = [
                member for member in self.everybody if any(id(parameter) in mine for parameter in member.parameters())
            ]
        return owned

    def add_model(self, model: Any) -> None:
        """Take in a prepared model."""
        self.models.append(model)
        synced = synced_part(model)
        if isinstance(synced, SyncedModel):
            self.synced_models.append(synced)
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
        self.synced_models.clear()
        self.leaves.clear()
        self._owners.clear()

    @property
    def next_backward_syncs(self) -> bool:
        """Whether a backward that no `accumulate` decides for waits for the ranks."""
        # DDP decides at the forward; of other members all that is known is what they are set to.
        return any(
            member.notes.forwards & FORWARD_SYNCED
            if isinstance(member, SyncedModel)
            else getattr(member, "require_backward_grad_sync", True)
            for member in self.everybody
        )

    @property
    def everybody(self) -> list[Member]:
        """The models, without what compiled them, and the leaf tensors."""
        return [*map(synced_part, self.models), *self.leaves]
