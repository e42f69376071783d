"""The members of training: models and leaf tensors, those of an `accumulate`, and when their gradients are reduced."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training.accumulation.ddp import Notes
from notebook_launcher.training.accumulation.member_kinds import (
    LeafTensor,
    PlainModel,
    PreparedModel,
    SharedBuffers,
    StrayParameters,
    SwitchOff,
    member_of,
    synchronises_itself,
)
from notebook_launcher.training.operations.checking import collective_device
from notebook_launcher.training.spread_tensors import is_spread
from notebook_launcher.training.unwrapping import synced_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from notebook_launcher.training.accumulation.member_kinds import Member
    from notebook_launcher.training.accumulation.windows import Window


# --------------------------------------------------------------------------------------------------------------------
# Members of training: prepared models and leaf tensors, with the optimizers that update their parameters.


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


# --------------------------------------------------------------------------------------------------------------------
# The arguments of `accumulate` and `no_sync`, and the parameters in them, by which `Members` finds its members.
#
# Users pass the prepared model, a compiled or containing module, `model.module`, the name from before `prepare`, a
# list. All of these hold the parameters of a prepared model, so parameters decide.


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


# --------------------------------------------------------------------------------------------------------------------
# Results of lookups among the members, kept for as long as the members stay as they are.


@dataclasses.dataclass(frozen=True, slots=True)
class Owned:
    """The parameters that an optimizer updates, by member."""

    sizes: list[int]
    """Number of parameters in each of the optimizer's groups when this was looked up."""
    members: list[Member]
    local: list[torch.Tensor]
    """Parameters whose gradients nothing synchronises."""
    shared: dict[int, list[torch.Tensor]]
    """By the id of a member that other prepared optimizers update, too: the parameters that they update."""


@dataclasses.dataclass(slots=True)
class LookedUp:
    """Results of lookups among the present members; `Members` replaces them when the members change.

    The keys are ids of objects, so they do not travel to another process.
    """

    owned: dict[int, Owned] = dataclasses.field(default_factory=dict)
    """By the id of an optimizer."""
    covered: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """The ids of an optimizer and a window, if the window's `accumulate` was given all of the optimizer's members.
    Looking it up takes 2 µs."""
    has_sparse_gradients: bool | None = None
    """True if members have sparse gradients; None if nobody has asked yet."""
    probes: dict[int, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    """By the id of a window: a trained parameter of each member and each optimizer whose gradients it gathers. Without
    them, each window would begin with a walk through the whole model."""


# --------------------------------------------------------------------------------------------------------------------
# Decisions on when gradients are synchronised; all of them are in this file.
#
# A backward reduces a member's gradients over the ranks if the member's switch is on. DDP reads its switch at the
# forward, so a block sets the switches when it begins.
#
# | a micro-batch is computed | the switch | |---|---| | as the last of its window: `ends_window` | on | | earlier in
# its window: `switch_off` | off; on with `sync_each_batch=True`; partly on for sharded models with None | | outside
# any `accumulate` | on | | inside `no_sync`: `without_sync` | off | | inside `trigger_sync_in_backward`: `sync_next`
# | on, for the forwards before as well |
#
# Leaf tensors have no hooks, so `reduce_leaves` reduces them after the backward. Optimizers and schedulers step where
# a window ends, even with `sync_each_batch=True`: `GradientState.sync_gradients`.


def ends_window(num_batches: int, num_steps: int, *, is_last: bool) -> bool:
    """Return True if a micro-batch is the last of its window.

    Args:
        num_batches: Micro-batches of the window, with this one.
        num_steps: Micro-batches of a full window.
        is_last: True if its batch is the last of a prepared loader, and windows end where their loader ends.
    """
    return num_batches >= num_steps or is_last


def switch_off(members: Iterable[Member], *, sync_each_batch: bool | None) -> list[tuple[Member, bool]]:
    """Switch members off for a micro-batch that is not the last of its window; return what `switch_back` needs."""
    if sync_each_batch:
        return []
    asked = sync_each_batch is False
    switched_off = []
    for member in members:
        if member.switch_off is SwitchOff.ALWAYS or (asked and member.switch_off is SwitchOff.IF_ASKED):
            switched_off.append((member, member.set_sync(member.must_sync)))
        elif member.switch_off is SwitchOff.IF_ASKED:
            member.reduce_partly()
            switched_off.append((member, True))
    return switched_off


def switch_back(switched_off: Iterable[tuple[Member, bool]]) -> None:
    """Set the switches back to their states before `switch_off`."""
    for member, before in switched_off:
        member.set_sync(before)


@contextlib.contextmanager
def without_sync(members: Iterable[Member]) -> Iterator[None]:
    """Let the gradients of these members accumulate on each rank by itself, forward and backward."""
    before = [(member, member.set_sync(False)) for member in members]
    try:
        yield
    finally:
        switch_back(reversed(before))


@contextlib.contextmanager
def sync_next(members: Iterable[Member]) -> Iterator[None]:
    """Let the next backward synchronise all gathered gradients, though their forwards ran under `no_sync`."""
    with contextlib.ExitStack() as stack:
        for member in members:
            stack.enter_context(member.sync_next())
        yield


def waits_for_ranks(window: Window | None, members: Members) -> bool:
    """Return True if the last backward of a window, or one outside any, may reduce gradients: it waits for all ranks.

    Inside `no_sync` and `LocalSGD` such a backward reduces nothing.

    Args:
        window: The window of the block; None outside any.
        members: Models and tensors that an Accelerator trains.
    """
    trained = members.models_and_leaves if window is None else window.members or members.models_and_leaves
    for member in trained:  # not any(): it would make a generator at every update
        if member.reduces_next:
            return True
    return window is not None and not trained


def reduce_leaves(leaves: Sequence[LeafTensor]) -> bool:
    """Average the gradients of the leaf tensors whose switch is on; return False without any.

    One all-reduce for each dtype. A rank on which a tensor had no part in the loss counts as one whose gradient is
    zero.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for leaf in leaves:
        tensor = leaf.tensor
        leaf.was_reduced = leaf.syncs
        if not leaf.syncs:
            continue
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.grad)
    for grads in groups.values():
        _average(grads)
    return bool(groups)


def _average(grads: list[torch.Tensor]) -> None:
    """Replace gradients of one dtype by their means over the ranks."""
    flat = torch.cat([grad.reshape(-1) for grad in grads]) if len(grads) > 1 else grads[0].contiguous()
    if flat.device.type == "cpu":
        flat = flat.to(collective_device(flat.device))  # NCCL reduces no tensors on the CPU.
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    if len(grads) == 1:
        grads[0].copy_(flat)
        return
    at = 0
    for grad in grads:
        grad.copy_(flat[at : at + grad.numel()].view_as(grad))
        at += grad.numel()
