"""Members of training: prepared models and leaf tensors, with the optimizers that update their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.accumulation.members.ddp import Notes
from notebook_launcher.training.accumulation.members.looked_up import LookedUp, Owned
from notebook_launcher.training.accumulation.members.member_kinds import (
    LeafTensor,
    PlainModel,
    PreparedModel,
    StrayParameters,
    member_of,
    synchronises_itself,
)
from notebook_launcher.training.accumulation.members.shared_buffers import SharedBuffers
from notebook_launcher.training.accumulation.members.targets import flatten, parameters_of
from notebook_launcher.training.spread_tensors import is_spread
from notebook_launcher.training.unwrapping import synced_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.training.accumulation.members.member import Member

__all__ = ["Members"]


class Members:
    """The models and leaf tensors that `prepare` was given, and the parameters that its optimizers brought.

    Args:
        num_processes: Ranks that train together.
        strict: Raise for a target that contains nothing prepared; False: ignore it, as Accelerate does.
    """

    def __init__(self, *, num_processes: int = 1, strict: bool = True) -> None:
        self.models: list[Any] = []
        """The models as `prepare` returned them."""
        self.leaves: list[LeafTensor] = []
        """The leaf tensors that `prepare` was given."""
        self.synced_models: list[PreparedModel] = []
        """The models that `prepare` wrapped in DDP, which note their forwards and backwards."""
        self.shared_buffers: list[SharedBuffers] = []
        """The buffers that every rank takes from rank 0 where a window ends; DDP copies its models' buffers itself."""
        self.leaf_notes = Notes()
        """Notes of the reductions of all leaf tensors, which are reduced together."""
        self.num_backwards = 0
        """Backwards of the Accelerator since the last `zero_grad` that cleared."""
        self.version = 0
        """Grows with every change."""
        self.looked_up = LookedUp()
        """Results that hold until the next change."""
        self._of_modules: list[PlainModel] = []
        """The members of the models, and of modules whose optimizer alone was prepared."""
        self._strays: dict[int, StrayParameters] = {}
        """By the id of a prepared optimizer: its parameters that belong to no member."""
        self._num_processes = num_processes
        self._strict = strict

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "looked_up": LookedUp()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The keys are ids, which belong to other objects in another process.
        self._strays = {id(strays.optimizer): strays for strays in self._strays.values()}

    def find(self, targets: Iterable[Any]) -> list[Member]:
        """Return the members that the arguments of `accumulate` contain; no arguments mean all members.

        Parameters that an optimizer updates together with a member's parameters belong to the same window, though
        their model was not prepared: their gradients gather in the same micro-batches.

        Raises:
            ValueError: A target contains nothing that was prepared.
            TypeError: A target is neither a module nor a tensor, nor has it parameters.
        """
        flat = flatten(targets)
        found = {id(member): member for target in flat for member in self._with_strays(target)}
        if not flat:
            found = {id(member): member for member in self.models_and_leaves}
        for strays in self._look_for_strays():
            if not flat or any(id(member) in found for member in self.of_optimizer(strays.optimizer)):
                found[id(strays)] = strays
        if flat and not found and self._strict:
            named = ", ".join(type(target).__name__ for target in flat)
            raise ValueError(f"accumulate({named}): no parameters in it. Pass the model that prepare() returned.")
        return list(found.values())

    def inside(self, target: Any) -> list[Member]:
        """Return the members that hold a target's parameters; an empty list if no member holds any.

        Modules inside the target that `prepare` returned are found first. Parameters that are left over then belong
        to the member that holds most of them, and so on.

        Args:
            target: A module, a tensor, an optimizer, or any object with `parameters()`. Modules in it that synchronise
                their own gradients (`fully_shard`, DistributedDataParallel) and whose optimizer was prepared become
                members.

        Raises:
            TypeError: The target has no parameters to look at.
        """
        found = list(self._prepared_inside(target)) if isinstance(target, torch.nn.Module) else []
        left = {id(parameter) for parameter in parameters_of(target)}
        left.difference_update(id(parameter) for member in found for parameter in member.parameters())
        others = [(member, {id(parameter) for parameter in member.parameters()}) for member in self.models_and_leaves]
        while left:
            member, held = max(others, key=lambda pair: len(left & pair[1]), default=(None, set()))
            if member is None or left.isdisjoint(held):
                break
            found.append(member)
            left -= held
        return found

    def _prepared_inside(self, module: torch.nn.Module) -> Iterator[Member]:
        """Yield the members among a module and its submodules, the outermost of each branch."""
        pending, seen = [module], set()
        while pending:
            part = pending.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            member: Member | None = next((member for member in self._of_modules if member.module is part), None)
            if member is None and synchronises_itself(part) and self._owns_any(part.parameters()):
                self.looked_up.owned.clear()
                member = self._add_module(part)
            if member is None:
                pending.extend(reversed(list(part.children())))
            else:
                yield member

    def _owns_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if a prepared optimizer updates one of these parameters, and no member contains it."""
        mine = {id(tensor) for strays in self._look_for_strays() for tensor in strays.tensors}
        return any(id(parameter) in mine for parameter in parameters)

    def _with_strays(self, target: Any) -> list[Member]:
        found = self.inside(target)
        mine = {id(parameter) for parameter in parameters_of(target)}
        strays = [stray for stray in self._look_for_strays() if any(id(tensor) in mine for tensor in stray.tensors)]
        if not found and self._strict and mine:
            self._check_strays(target, strays)
        return [*found, *strays]

    def _check_strays(self, target: Any, strays: list[StrayParameters]) -> None:
        name = type(target).__name__
        advice = (
            "Write `model, optimizer = accelerator.prepare(model, optimizer)` before the loop, and pass that model or "
            "a module that contains it."
        )
        if not strays:
            raise ValueError(
                f"accumulate({name}): none of its parameters belongs to a model, a leaf tensor or an optimizer that "
                f"prepare() was given. A copy of a prepared model has parameters of its own. {advice}"
            )
        if self._num_processes > 1 and any(self.local_parameters(stray.optimizer) for stray in strays):
            raise ValueError(
                f"accumulate({name}): its optimizer was prepared, but the model was not. Nothing would synchronise its "
                f"gradients, and each of the {self._num_processes} ranks would train a model of its own. {advice}"
            )

    def contains_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if a member contains one of these parameters, or a prepared optimizer updates one."""
        members = [*self.models_and_leaves, *self._look_for_strays()]
        held = {id(parameter) for member in members for parameter in member.parameters()}
        return any(id(parameter) in held for parameter in parameters)

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[Member]:
        """Return the members whose parameters this optimizer updates."""
        return self.owned_by(optimizer).members

    def local_parameters(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the parameters of an optimizer whose gradients nothing synchronises.

        Such parameters belong to no member, or to a model that was wrapped while they were frozen or not yet in it.
        """
        return self.owned_by(optimizer).local

    def owned_by(self, optimizer: torch.optim.Optimizer) -> Owned:
        """Return the members of `of_optimizer`, and the parameters of `local_parameters`."""
        groups, known = optimizer.param_groups, self.looked_up.owned.get(id(optimizer))
        if known is not None and len(groups) == 1 and [len(groups[0]["params"])] == known.sizes:
            return known
        sizes = [len(group["params"]) for group in groups]
        if known is None or known.sizes != sizes:
            parameters = parameters_of(optimizer)
            mine = {id(parameter) for parameter in parameters}
            everything = [*self.models_and_leaves, *self._look_for_strays()]
            members = [
                member for member in everything if any(id(parameter) in mine for parameter in member.parameters())
            ]
            synced = {id(parameter) for member in members for parameter in member.synchronised}
            local = [parameter for parameter in parameters if id(parameter) not in synced and not is_spread(parameter)]
            shared = self._shared_with_others(optimizer, members)
            known = self.looked_up.owned[id(optimizer)] = Owned(sizes, members, local, shared)
        return known

    def _shared_with_others(
        self, optimizer: torch.optim.Optimizer, members: list[Member]
    ) -> dict[int, list[torch.Tensor]]:
        """Return the parameters of these members that only other prepared optimizers update, by the member's id."""
        others = [strays.optimizer for strays in self._strays.values() if strays.optimizer is not optimizer]
        theirs = {id(parameter) for other in others for parameter in parameters_of(other)}
        theirs.difference_update(map(id, parameters_of(optimizer)))
        found = {
            id(member): [parameter for parameter in member.parameters() if id(parameter) in theirs]
            for member in (members if theirs else ())
        }
        return {key: parameters for key, parameters in found.items() if parameters}

    def are_set_by_hand(self, notes: Notes) -> bool:
        """Return True if no backward of the Accelerator can have written the gradients of a model with these notes.

        They may come from `torch.autograd.grad`, and be averaged by `accelerator.reduce`.
        """
        return not notes.answered and (bool(notes.forwards) or not self.num_backwards)

    def _look_for_strays(self) -> list[StrayParameters]:
        """Return the parameters of each optimizer that belong to no other member."""
        held = {id(parameter) for member in self.models_and_leaves for parameter in member.parameters()}
        for strays in self._strays.values():
            everything = parameters_of(strays.optimizer)
            strays.tensors = [parameter for parameter in everything if id(parameter) not in held]
        return [strays for strays in self._strays.values() if strays.tensors]

    def add_model(self, model: Any) -> None:
        """Add a prepared model."""
        self.models.append(model)
        member = self._add_module(synced_part(model))
        if isinstance(member, PreparedModel):
            self.synced_models.append(member)
        self.changed()

    def share_buffers(self, model: torch.nn.Module) -> None:
        """Copy the buffers from rank 0 to every rank where a window ends, as DDP does at each forward."""
        self.shared_buffers += [SharedBuffers(member) for member in self._of_modules if member.module is model]

    def _add_module(self, module: torch.nn.Module) -> PlainModel:
        member = member_of(module)
        self._of_modules.append(member)
        return member

    def add_leaf(self, tensor: torch.Tensor) -> LeafTensor:
        """Add a leaf tensor."""
        leaf = LeafTensor(tensor)
        self.leaves.append(leaf)
        self.changed()
        return leaf

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the parameters of a prepared optimizer, as far as no member has them."""
        self._strays[id(optimizer)] = StrayParameters(optimizer)
        self.changed()

    def changed(self) -> None:
        """Forget the results of lookups, because members were added or an optimizer has other parameters."""
        self.version += 1
        self.looked_up = LookedUp()

    def clear(self) -> None:
        """Release everything."""
        self.models.clear()
        self.synced_models.clear()
        self.shared_buffers.clear()
        self.leaves.clear()
        self._of_modules.clear()
        self._strays.clear()
        self.changed()

    @property
    def models_and_leaves(self) -> list[Member]:
        """The models, without what compiled them, and the leaf tensors."""
        return [*self._of_modules, *self.leaves]
