"""Members: models and leaf tensors that are trained together, and when their gradients are reduced."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher.training.fingerprints import fingerprint_nested
from notebook_launcher.training.operations.checking import collective_device
from notebook_launcher.training.plugins import DDPCommunicationHookType as Hook
from notebook_launcher.training.plugins import DistributedDataParallelKwargs
from notebook_launcher.training.process.arrivals import EVALUATION, meet
from notebook_launcher.training.spread_tensors import is_spread
from notebook_launcher.training.unwrapping import synced_part
from notebook_launcher.wording import class_name, first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.training.accumulation.windows import Window
    from notebook_launcher.training.user_warnings import Warner


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
            if not flat or any(id(member) in found for member in self.owned_by(strays.optimizer).members):
                found[id(strays)] = strays
        if flat and not found and self._strict:
            named = ", ".join(class_name(target) for target in flat)
            raise ValueError(f"accumulate({named}): no parameters in it. Pass the model that prepare() returned.")
        return list(found.values())

    def inside(self, target: Any) -> list[Member]:
        """Return the members that hold a target's parameters; an empty list if no member holds any.

        A target is a module, a tensor, an optimizer, or any object with `parameters()`. Modules inside it that
        `prepare` returned are found first. Parameters that are left over then belong to the member that holds most of
        them, and so on. Modules that synchronise their own gradients (`fully_shard`, DistributedDataParallel) and whose
        optimizer was prepared become members.
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
            if member is None and synchronises_itself(part):
                # Only where a prepared optimizer updates one of its parameters, and no member contains it.
                mine = {id(tensor) for strays in self._look_for_strays() for tensor in strays.tensors}
                if any(id(parameter) in mine for parameter in part.parameters()):
                    self.looked_up.owned.clear()
                    member = self._add_module(part)
            if member is None:
                pending.extend(reversed(list(part.children())))
            else:
                yield member

    def _with_strays(self, target: Any) -> list[Member]:
        found = self.inside(target)
        mine = {id(parameter) for parameter in parameters_of(target)}
        strays = [stray for stray in self._look_for_strays() if any(id(tensor) in mine for tensor in stray.tensors)]
        if not found and self._strict and mine:
            self._check_strays(target, strays)
        return [*found, *strays]

    def _check_strays(self, target: Any, strays: list[StrayParameters]) -> None:
        name = class_name(target)
        advice = (
            "Write `model, optimizer = accelerator.prepare(model, optimizer)` before the loop, and pass that model or "
            "a module that contains it."
        )
        if not strays:
            raise ValueError(
                f"accumulate({name}): none of its parameters belongs to a model, a leaf tensor or an optimizer that "
                f"prepare() was given. A copy of a prepared model has parameters of its own. {advice}"
            )
        if self._num_processes > 1 and any(self.owned_by(stray.optimizer).local for stray in strays):
            raise ValueError(
                f"accumulate({name}): its optimizer was prepared, but the model was not. Nothing would synchronise its "
                f"gradients, and each of the {self._num_processes} ranks would train a model of its own. {advice}"
            )

    def contains_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if a member contains one of these parameters, or a prepared optimizer updates one."""
        members = [*self.models_and_leaves, *self._look_for_strays()]
        held = {id(parameter) for member in members for parameter in member.parameters()}
        return any(id(parameter) in held for parameter in parameters)

    def owned_by(self, optimizer: torch.optim.Optimizer) -> Owned:
        """Return the members and parameters that this optimizer updates."""
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
        f"accumulate({class_name(target)}): expected the models, or the leaf tensors, that prepare() returned, or "
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
    """Parameters whose gradients nothing synchronises: they belong to no member, or to a model that was wrapped while
    they were frozen or not yet in it."""
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
# forward, so a block sets the switches when it begins. The page `explanation/one-micro-batch` has a table of the cases.
#
# Leaf tensors have no hooks, so `reduce_leaves` reduces them after the backward. Optimizers and schedulers step where
# a window ends, even with `sync_each_batch=True`: `GradientState.sync_gradients`.


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

    Inside `no_sync` and `LocalSGD` such a backward reduces nothing. `window` is None outside any block.
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
        leaf.is_synced = leaf.reduces_next
        if not leaf.reduces_next:
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
    parts = torch.split(flat, [grad.numel() for grad in grads]) if len(grads) > 1 else (flat,)
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))


# --------------------------------------------------------------------------------------------------------------------
# A member: parameters that are trained together, and what windows and updates ask of it.


class SwitchOff(enum.Enum):
    """The cases in which a window switches a member off, in all micro-batches but its last."""

    ALWAYS = enum.auto()
    IF_ASKED = enum.auto()
    """With `sync_each_batch=False`: unreduced gradients of a sharded model take as much memory as a whole model's."""
    NEVER = enum.auto()


class Member(ABC):
    """Parameters that are trained together; the base of all kinds, which synchronises nothing."""

    switch_off = SwitchOff.NEVER
    notes: Notes | None = None
    """Notes of the forwards and backwards; only a model that `prepare` wrapped in DDP keeps any."""

    @abstractmethod
    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters."""

    @property
    def synchronised(self) -> Iterable[torch.Tensor]:
        """The parameters whose gradients this member synchronises on all ranks; shards differ between ranks."""
        return ()

    def set_sync(self, on: bool) -> bool:  # noqa: ARG002 - a switch
        """Switch the synchronisation of gradients on or off; return the state before."""
        return True

    def reduce_partly(self) -> None:  # noqa: B027 - nothing to reduce, by default
        """Reduce only as far as needed inside a window, though the switch is on; `set_sync` ends that."""

    @property
    def must_sync(self) -> bool:
        """True if the next backward has to synchronise even inside a window."""
        return False

    @property
    def reduces_next(self) -> bool:
        """True if a backward that no `accumulate` decides for may wait for the other ranks."""
        return True

    @property
    def is_synced(self) -> bool:
        """False if this rank's gradients are known to be its own."""
        return True

    def has_gradients(self) -> bool:
        """Return True if any parameter has a gradient."""
        return have_gradients(self.parameters())

    def drop_gradients(self) -> None:
        """Drop all gradients, wherever they are kept."""
        for parameter in self.parameters():
            parameter.grad = None

    def clear_synced(self) -> None:  # noqa: B027 - nothing to forget, by default
        """Forget that the gradients were synchronised, because they are cleared."""

    def sync_next(self) -> contextlib.AbstractContextManager[None]:
        """Synchronise all gradients at the next backward, though its forward ran with the switch off."""
        return contextlib.nullcontext()

    @abstractmethod
    def describe(self) -> str:
        """Return the member's name for messages."""

    def explain_unsynced(self) -> str:
        """Return why the gradients were not synchronised, and what to write instead."""
        return ""


# --------------------------------------------------------------------------------------------------------------------
# Kinds of members, each with its way to synchronise gradients.
#
# Inside a window, the gradients of a sharded model with several replicas are reduced partly: over the ranks that
# share a replica, not over the replicas.


NUMBERS = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""In DDP's error: the parameters that a backward did not reach."""


class PlainModel(Member):
    """A module that synchronises nothing: on one process, without trained parameters, or only evaluated."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: Any = module

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the module's parameters."""
        return iter(self.module.parameters())

    def describe(self) -> str:
        """Return the class of the module, or of the one that it wraps."""
        return class_name(getattr(self.module, "module", self.module))


class ShardedModel(PlainModel):
    """A module that `fully_shard` (FSDP2) was applied to."""

    switch_off = SwitchOff.IF_ASKED

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        for unit in module.modules():
            if is_sharded(unit):
                unit.reshard()  # type: ignore[operator] # after a forward, a module may have its whole parameters
        self._parameters = tuple(module.parameters())
        self._groups = [group for group in parameter_groups(module) if group is not None]

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the sharded parameters, which optimizers have; between forward and backward the module has others."""
        return iter(self._parameters)

    def set_sync(self, on: bool) -> bool:  # a switch
        """Switch the reduction on or off; return True, because torch does not report the state before."""
        self.module.set_requires_gradient_sync(on)
        return True

    def reduce_partly(self) -> None:
        """Reduce over the ranks that share a replica out, and leave the sum over replicas for the window's end."""
        self.module.set_requires_all_reduce(False)

    @property
    def is_synced(self) -> bool:
        """False if gradients were computed that have not been reduced over all ranks."""
        return not has_held(self._groups)

    def has_gradients(self) -> bool:
        """Return True if any parameter has a gradient, or FSDP2 keeps one that it has not reduced."""
        return has_held(self._groups) or super().has_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients, also gradients that FSDP2 keeps itself."""
        super().drop_gradients()
        drop_held(self._groups)

    def explain_unsynced(self) -> str:
        """Return the ways in which the gradients of a sharded model stay unsynchronised."""
        if written := _checkpoint_without_reentry(self.module):
            return (
                "This model computes activations again, and FSDP2 loses gradients behind a reentrant checkpoint in a "
                f"second forward: write {written}. Or its backward ran under no_sync(): write `with "
                "accelerator.accumulate(model):` around forward and backward."
            )
        return (
            "Its backward ran under no_sync(), or after set_requires_gradient_sync(False): FSDP2 decides at the "
            "backward. Put the last micro-batch outside, or write `with accelerator.accumulate(model):` around forward "
            "and backward. A part of the model that the last micro-batch did not use keeps its sum, too: pass "
            "DistributedDataParallelKwargs(find_unused_parameters=True)."
        )


def _checkpoint_without_reentry(model: torch.nn.Module) -> str:
    """Return what to write in the place of a reentrant checkpoint; empty if the model's code shows no checkpoint."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:  # Of transformers.
            return 'model.gradient_checkpointing_enable({"use_reentrant": False})'
        forward = type(module).forward
        code = getattr(forward, "__code__", None)
        if code is not None and "checkpoint" in (*code.co_names, *code.co_varnames):
            return f"checkpoint(..., use_reentrant=False) in {forward.__qualname__}"
    return ""


class DDPModel(PlainModel):
    """A DistributedDataParallel that the user made: its switch is known, its forwards are not noted."""

    @property
    def synchronised(self) -> Iterable[torch.Tensor]:
        """All parameters."""
        return self.parameters()

    def set_sync(self, on: bool) -> bool:  # a switch
        """Set DDP's switch, which it reads at the forward."""
        before: bool = self.module.require_backward_grad_sync
        # Written into the dictionary, because Module.__setattr__ takes a microsecond.
        self.module.__dict__["require_backward_grad_sync"] = on
        return before

    @property
    def reduces_next(self) -> bool:
        """The state of the switch now; it may have been different in the forward."""
        return bool(self.module.require_backward_grad_sync)

    @contextlib.contextmanager
    def sync_next(self) -> Iterator[None]:
        """Synchronise all gradients at the next backward, though its forward ran with the switch off."""
        model = self.module
        before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
        before_forward, model.require_forward_param_sync = model.require_forward_param_sync, True
        # DDP prepares its reducer in the forward, which is over. With an empty list it waits for all parameters.
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync = before
            model.require_forward_param_sync = before_forward


class PreparedModel(DDPModel):
    """A DistributedDataParallel that `prepare` made, which notes its forwards."""

    switch_off = SwitchOff.ALWAYS
    module: SyncedModel
    notes: Notes

    def __init__(self, module: SyncedModel) -> None:
        super().__init__(module)
        self.notes = module.notes

    @property
    def synchronised(self) -> Iterable[torch.Tensor]:
        """The parameters that were trained when `prepare` wrapped the model."""
        return self.module.trained

    @property
    def must_sync(self) -> bool:
        """True at the very first iteration with `static_graph`: torch records the graph there."""
        model = self.module
        return bool(model.require_backward_grad_sync and model.static_graph and not self.notes.recorded)

    @property
    def reduces_next(self) -> bool:
        """True if the forward ran with the switch on, which is where DDP decides."""
        return bool(self.notes.forwards & FORWARD_SYNCED)

    @property
    def is_synced(self) -> bool:
        """True if the backward of the last forward has reduced the gradients, or will."""
        # A forward without a noted backward: the user called loss.backward() and not accelerator.backward(loss).
        return bool((self.notes.answered | self.notes.forwards) & FORWARD_SYNCED) and self.unreduced is None

    @property
    def unreduced(self) -> str | None:
        """The error of a reduction that DDP has begun and not finished; None: there is none."""
        try:
            self.module.reducer._check_reducer_finalized()  # noqa: SLF001 - as DDP's own forward does; 0.3 µs
        except RuntimeError as error:
            return str(error)
        return None

    def note_backward(self, versions: list[int] | None, warn_once: Warner) -> None:
        """Note, if the backward that has run wrote to the gradients, which forwards the gradients come from.

        Args:
            versions: Versions of the gradients before the backward. None: it has written if there are gradients.
            warn_once: Warns of a `no_sync` that was around the backward only.
        """
        model, notes = self.module, self.notes
        if versions is not None:
            has_written = model.grad_versions() != versions
        else:  # Nearly always the first parameter has a gradient, and no call is needed.
            has_written = (model.trained and model.trained[0].grad is not None) or model.has_gradients()
        if not has_written:
            return
        if notes.forwards == FORWARD_SYNCED and not model.require_backward_grad_sync:
            warn_once(
                "backward alone",
                f"{type(model.module).__name__}: no_sync() was around the backward only. DDP decides at the forward, "
                "so the gradients were synchronised anyway. Put forward and backward inside, or "
                "write `with accelerator.accumulate(model):` around both.",
            )
        if notes.forwards & FORWARD_SYNCED and not model._join_config.enable:  # noqa: SLF001 - ranks leave a join apart
            notes.num_synced += 1
        notes.answered, notes.forwards = notes.forwards or FORWARD_REPEATED, 0

    def _unreached(self, error: str) -> str:
        """Return the names of the parameters that DDP lists by their numbers in its error."""
        listed = NUMBERS.search(error)
        numbers = set() if listed is None else set(map(int, listed[1].split()))
        missing = {id(parameter) for at, parameter in enumerate(self.module.trained) if at in numbers}
        names = [name for name, parameter in self.module.module.named_parameters() if id(parameter) in missing]
        return first_few(names) or "some of them"

    def clear_synced(self) -> None:
        """Forget from which forwards the gradients come."""
        self.notes.answered = 0

    @contextlib.contextmanager
    def sync_next(self) -> Iterator[None]:
        """Synchronise all gradients at the next backward, and note the forwards as synchronised ones."""
        with super().sync_next():
            self.notes.forwards = FORWARD_SYNCED
            yield

    def explain_unsynced(self) -> str:
        """Return the reason, by DDP's reducer, and by the notes of forwards and backwards."""
        if (unreduced := self.unreduced) is not None:
            return (
                f"DDP waits for the gradient of every parameter before it reduces the last ones, and the last backward "
                f"did not reach {self._unreached(unreduced)}. Pass Accelerator(kwargs_handlers="
                "[DistributedDataParallelKwargs(find_unused_parameters=True)]), or freeze before prepare()."
            )
        notes = self.notes
        if notes.answered == FORWARD_REPEATED:
            return (
                "A second backward() went through a forward whose gradients had been synchronised; DDP does that once "
                "for each forward. Add the losses up and write one backward(loss_a + loss_b)."
            )
        if notes.answered or notes.forwards:
            return (
                "The last micro-batch's forward was left out on this rank, or ran under no_sync(): DDP decides at the "
                "forward whether its backward synchronises. Run forward and backward of the last micro-batch on every "
                "rank, both outside no_sync(), or write `with accelerator.accumulate(model):` around both. If "
                "micro-batches use different models, set sync_each_batch=True in GradientAccumulationPlugin."
            )
        return (
            "Its forward went past the prepared model, as unwrap_model(model)(x) or a method such as model.encode(x) "
            "do, or the last micro-batch did without it. Call the prepared model itself: model(x). To average "
            "gradients by hand, compute them by torch.autograd.grad or loss.backward(), not by "
            "accelerator.backward(loss)."
        )


class LeafTensor(Member):
    """A tensor that is trained by itself, not as a module's parameter."""

    switch_off = SwitchOff.ALWAYS
    reduces_next = True
    """The switch: False if a micro-batch keeps the gradient on its rank."""
    is_synced = False
    """True after a backward whose gradient was averaged over the ranks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the tensor."""
        yield self.tensor

    @property
    def synchronised(self) -> Iterable[torch.Tensor]:
        """The tensor."""
        return (self.tensor,)

    def set_sync(self, on: bool) -> bool:  # a switch
        """Set the switch, which is read after the backward."""
        before, self.reduces_next = self.reduces_next, on
        return before

    def clear_synced(self) -> None:
        """Forget the reduction."""
        self.is_synced = False

    def describe(self) -> str:
        """Return "a leaf tensor"."""
        return "a leaf tensor"

    def explain_unsynced(self) -> str:
        """Return the one way in which the gradient of a leaf tensor stays unsynchronised."""
        return "Call accelerator.backward(loss) outside of no_sync(), not loss.backward()."


class StrayParameters(Member):
    """Parameters of a prepared optimizer that belong to no prepared model or leaf tensor.

    On one process they are trained like any others. On several, nothing synchronises their gradients, unless they
    are shards (`DTensor`), whose module does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.tensors: list[torch.Tensor] = []
        """The parameters, which `Members` looks up again at each use."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters."""
        return iter(self.tensors)

    def describe(self) -> str:
        """Return whose parameters they are."""
        return f"parameters of {type(self.optimizer).__name__}"


def member_of(module: Any) -> PlainModel:
    """Return the member that a module is, by how it synchronises its gradients."""
    if isinstance(module, SyncedModel):
        return PreparedModel(module)
    if isinstance(module, DistributedDataParallel):
        return DDPModel(module)
    return ShardedModel(module) if is_sharded(module) else PlainModel(module)


def synchronises_itself(module: Any) -> bool:
    """Return True for DistributedDataParallel and for a module that `fully_shard` was applied to."""
    return is_sharded(module) or isinstance(module, DistributedDataParallel)


def is_sharded(model: Any) -> bool:
    """Return True if `fully_shard` (FSDP2) was applied to the model."""
    return hasattr(model, "set_requires_gradient_sync")


def have_gradients(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if any of these tensors has a gradient."""
    for tensor in tensors:  # noqa: SIM110 - any() would make a generator at every backward
        if tensor.grad is not None:
            return True
    return False


# --------------------------------------------------------------------------------------------------------------------
# Gradients that torch's FSDP2 keeps in its own state, where `parameter.grad = None` does not reach them.
#
# A backward that does not reduce leaves whole gradients there, and one that leaves out the all-reduce of HSDP leaves
# a partial sum. Torch has no public way to see or drop them: `reset_iter_state()` of torch 2.13 keeps them.


def parameter_groups(module: torch.nn.Module) -> Iterator[Any]:
    """Yield torch's states of the units of a sharded module."""
    for unit in module.modules():
        if hasattr(unit, "_get_fsdp_state"):
            state: Any = getattr(unit, "_get_fsdp_state")()  # noqa: B009 - for mypy, a module's attributes are tensors
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # Older torch has one at most, and None for a unit without parameters of its own.
                groups = filter(None, [state._fsdp_param_group])  # noqa: SLF001
            yield from groups


def has_held(groups: Iterable[Any]) -> bool:
    """Return True if gradients were computed that have not been reduced over all ranks."""
    return any(
        group._partial_reduce_output is not None or any(map(_is_held, group.fsdp_params))  # noqa: SLF001
        for group in groups
    )


def drop_held(groups: Iterable[Any]) -> None:
    """Drop these gradients."""
    for group in groups:
        group._partial_reduce_output = None  # noqa: SLF001
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None
            if parameter.unsharded_accumulated_grad is not None:  # torch 2.15 reads this one from the one above.
                parameter.unsharded_accumulated_grad = None


def held_places(group: Any) -> list[int]:
    """Return the places of the parameters of a unit for which gradients are held."""
    return [place for place, parameter in enumerate(group.fsdp_params) if _is_held(parameter)]


def trained_places(group: Any) -> list[int]:
    """Return the places of the parameters of a unit that are trained."""
    return [place for place, parameter in enumerate(group.fsdp_params) if parameter.sharded_param.requires_grad]


def hold_zeros(group: Any) -> None:
    """Give zeros to the trained parameters of a unit for which no gradient is held, as if the loss did not change."""
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None and unsharded.requires_grad and not _is_held(parameter):
            unsharded.grad = torch.zeros_like(unsharded)


def _is_held(parameter: Any) -> bool:
    unsharded = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


# --------------------------------------------------------------------------------------------------------------------
# Buffers of a sharded model, such as a batch norm's statistics: copied from rank 0 to every rank.
#
# DistributedDataParallel broadcasts buffers before each forward; `fully_shard` leaves each rank its own buffers.


class SharedBuffers:
    """The buffers in a model's state dict. Buffers outside of it are computed, and equal on all ranks."""

    def __init__(self, member: PlainModel) -> None:
        self.member = member
        """The model that has the buffers."""
        self._modules = [module for module in member.module.modules() if any(True for _ in _persistent(module))]

    def broadcast(self) -> None:
        """Replace the values by the values of rank 0, with one broadcast for each dtype."""
        found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for module in self._modules:
            for buffer in _persistent(module):
                found.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for buffers in found.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            dist.broadcast(flat, src=0)
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            with torch.no_grad():
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))


def _persistent(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for name, buffer in module._buffers.items():  # noqa: SLF001 - to leave out what the state dict leaves out
        if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield buffer


# --------------------------------------------------------------------------------------------------------------------
# DistributedDataParallel as `prepare` makes it: with notes of its forwards, and the communication hook.


DEFAULTS = DistributedDataParallelKwargs()
FORWARD_ALONE = 1
"""A forward ran whose backward will not synchronise."""
FORWARD_SYNCED = 2
FORWARD_REPEATED = 4
"""A second backward ran through a forward whose backward had already run.

DDP reduces once for each forward, so what it added stays the rank's own.
"""


class SyncedModel(DistributedDataParallel):
    """DistributedDataParallel that notes the state of the switch at each forward.

    DDP decides in the forward whether the backward synchronises. If the switch differs between forward and backward,
    each rank silently keeps its own gradients. `Updates.step` finds this in the notes and refuses the step.

    The model's public attributes and methods are reached through it, as on one rank. What one of its methods computes
    does not go through this forward: without gradients that is harmless, and a step with such gradients is refused.
    """

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # torch 2.15 advises another name, which Accelerate's options lack and which means something else if False.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(module, **kwargs)
        if hasattr(module, "dim"):
            del self.dim  # The models' own size is often called so, and torch reads its own for several devices only.
        self.notes = Notes()
        """Notes of the forwards and backwards."""
        self.trained = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)
        """The parameters that get gradients."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            # By private names libraries find out what a module is, and `copy` and `pickle` how to treat it.
            if name.startswith("_") or model is None:
                if name.startswith("__") or not hasattr(model, name):
                    raise
                raise AttributeError(
                    f"{name!r} is private to {class_name(model)}, which prepare() wraps on several ranks. Write "
                    f"accelerator.unwrap_model(model).{name}."
                ) from None
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name not in own and "trained" in own and not name.startswith("_") and not hasattr(type(self), name):
            model = self._modules["module"]
            if hasattr(model, name) and name not in self._modules:
                setattr(model, name, value)
                return
        super().__setattr__(name, value)

    def has_gradients(self) -> bool:
        """Return True if any parameter has a gradient."""
        return have_gradients(self.trained)

    def grad_versions(self) -> list[int]:
        """Return the number of writes to each gradient; -1 for a parameter without a gradient."""
        return [-1 if tensor.grad is None else tensor.grad._version for tensor in self.trained]  # noqa: SLF001

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if torch.is_grad_enabled():
            notes = self.notes
            if self.require_backward_grad_sync:
                notes.forwards |= FORWARD_SYNCED
                notes.recorded = True
                # Not while it is compiled: the count would be compiled too, and make it compile at every step.
                if notes.compares and not torch.compiler.is_compiling() and notes.is_due:
                    notes.inputs = fingerprint_nested((inputs, kwargs))
            else:
                notes.forwards |= FORWARD_ALONE
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, which DDP does in the first forward after a backward that synchronised."""
        is_shared = dist.get_world_size(self.process_group) == dist.get_world_size()
        evaluates = not torch.is_grad_enabled() and is_shared and not torch.compiler.is_compiling()
        if evaluates and not meet(EVALUATION) and dist.get_rank() == 0:
            return
        super()._sync_buffers()  # type: ignore[no-untyped-call]


@dataclasses.dataclass(slots=True)
class Notes:
    """Notes of a model's forwards and backwards, beside the module, whose `__setattr__` inspects every value."""

    forwards: int = 0
    """The states of the switch at the forwards whose backward has not run yet, as flags."""
    answered: int = 0
    """The states of the switch at the forwards of the last backward, whose gradients the parameters hold; 0: none."""
    recorded: bool = False
    """True after the first forward whose backward synchronises; `static_graph` records the graph there."""
    trains_alone: bool = False
    """True if each rank steps with its own gradients on purpose (`LocalSGD`)."""
    num_synced: int = 0
    """Number of backwards that have reduced the gradients; equal on all ranks."""
    compared: int = 0
    """The value of `num_synced` at which the ranks last compared their weights."""
    inputs: int | None = None
    """Fingerprint of the inputs of the last forward that was to be compared; None: none was, or no tensors."""
    compares: bool = False
    """True if the ranks compare their weights now and then."""
    own_state: str = ""
    """The name of the cause that left each rank an optimizer state of its own."""

    @property
    def is_due(self) -> bool:
        """True if the ranks compare their weights at the next backward that reduces: at 1, 2, 4, 8 and so on."""
        return not self.num_synced & (self.num_synced + 1)


def wrap(
    model: torch.nn.Module,
    device: torch.device,
    kwargs: DistributedDataParallelKwargs,
    *,
    compares: bool = False,
) -> SyncedModel:
    """Return a model, which is on its device, with its gradients synchronised; its weights become rank 0's."""
    names = ("dim", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view",
             "static_graph")  # fmt: skip
    # Only what differs from torch's defaults: newer versions warn of `broadcast_buffers`, whatever its value.
    given = {name: value for name in names if (value := getattr(kwargs, name)) != getattr(DEFAULTS, name)}
    if "power_sgd" in kwargs.comm_hook and device.type == "cpu":
        # PowerSGD's later reductions start from threads, in an order that differs between ranks. gloo mistakes one
        # for another, and fails or waits for ever (torch 2.13). A single bucket has only one order.
        assert kwargs.bucket_cap_mb is not None  # None becomes a number when the settings are made.
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        given["bucket_cap_mb"] = max(kwargs.bucket_cap_mb, (size >> 20) + 1)
    devices = [device.index] if device.type == "cuda" else None
    synced = SyncedModel(model, device_ids=devices, **given)
    synced.notes.compares = compares
    chosen, state = _make_hook(synced, kwargs)
    if chosen is not None:
        # The hook gets a name of its own, because torch refuses the bf16 hooks by their names on gloo, which can reduce
        # bf16. It has no annotations, because torch compares annotations with classes, and this module's are text.
        def reduce(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            return chosen(state, bucket)

        synced.register_comm_hook(state, reduce)
    return synced


def _make_hook(
    model: SyncedModel, kwargs: DistributedDataParallelKwargs
) -> tuple[Callable[[Any, Any], Any] | None, Any]:
    """Return the communication hook that the settings ask for, and its state; None: DDP's own reduction."""
    if kwargs.comm_hook == Hook.NO:
        return None, None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    simple = {Hook.FP16: default_hooks.fp16_compress_hook, Hook.BF16: default_hooks.bf16_compress_hook}
    power = {Hook.POWER_SGD: powerSGD_hook.powerSGD_hook, Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook}
    wrappers = {Hook.FP16: default_hooks.fp16_compress_wrapper, Hook.BF16: default_hooks.bf16_compress_wrapper}
    hook: Any = simple.get(kwargs.comm_hook) or power.get(kwargs.comm_hook)  # type: ignore[call-overload]
    state: Any = model.process_group
    if kwargs.comm_hook in power:
        state = powerSGD_hook.PowerSGDState(model.process_group, **kwargs.comm_state_option)
    wrapper = wrappers.get(kwargs.comm_wrapper)  # type: ignore[call-overload]
    return hook if wrapper is None else wrapper(hook), state
