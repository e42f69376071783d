"""A member: parameters that are trained together, and what windows and updates ask of it."""

from __future__ import annotations

import contextlib
import enum
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher.training.accumulation.ddp import FORWARD_REPEATED, FORWARD_SYNCED, SyncedModel
from notebook_launcher.wording import first_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.training.accumulation.ddp import Notes
    from notebook_launcher.training.user_warnings import Warner


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
        return any(parameter.grad is not None for parameter in self.parameters())

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
# | member | its gradients are reduced | a window switches that off | |---|---|---| | `PreparedModel` | by DDP, in a
# backward whose forward ran with the switch on | always | | `DDPModel`, which the user wrapped | as a `PreparedModel`
# | never | | `ShardedModel` (`fully_shard`) | by FSDP2, in a backward with the switch on | with
# `sync_each_batch=False` | | `LeafTensor` | after the backward, by `synchronisation.reduce_leaves` | always | |
# `PlainModel`, `StrayParameters` | never: one process, frozen, or not prepared | there is nothing to switch off |
#
# Inside a window, the gradients of a sharded model with several replicas are reduced partly: over the ranks that
# share a replica, not over the replicas. `members.py` decides when a switch is off.


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
        return type(getattr(self.module, "module", self.module)).__name__


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

    @property
    def may_be_reached(self) -> bool:
        """True if the next backward may write to the gradients: after a forward, or through one that it repeats."""
        return bool(self.notes.forwards or self.notes.answered & FORWARD_SYNCED)

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
            "Its forward went past the prepared model, as unwrap_model(model)(x) or model.module(x) do, or the last "
            "micro-batch did without it. Call the model that prepare() returned. To average gradients by hand, compute "
            "them by torch.autograd.grad or loss.backward(), not by accelerator.backward(loss)."
        )


class LeafTensor(Member):
    """A tensor that is trained by itself, not as a module's parameter."""

    switch_off = SwitchOff.ALWAYS

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.syncs = True
        """The switch: False if a micro-batch keeps the gradient on its rank."""
        self.was_reduced = False
        """True after a backward whose gradient was averaged over the ranks."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the tensor."""
        yield self.tensor

    @property
    def synchronised(self) -> Iterable[torch.Tensor]:
        """The tensor."""
        return (self.tensor,)

    def set_sync(self, on: bool) -> bool:  # a switch
        """Set the switch, which is read after the backward."""
        before, self.syncs = self.syncs, on
        return before

    @property
    def reduces_next(self) -> bool:
        """The switch."""
        return self.syncs

    @property
    def is_synced(self) -> bool:
        """True after a backward that averaged the gradient over the ranks."""
        return self.was_reduced

    def clear_synced(self) -> None:
        """Forget the reduction."""
        self.was_reduced = False

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
