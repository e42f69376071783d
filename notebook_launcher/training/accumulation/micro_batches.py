"""One micro-batch: the block around it, and its backward with the factor that the window gives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd import graph

from notebook_launcher import context
from notebook_launcher.context import notify_of_loss
from notebook_launcher.training.accumulation.members import (
    FORWARD_SYNCED,
    SwitchOff,
    reduce_leaves,
    switch_back,
    switch_off,
    waits_for_ranks,
)
from notebook_launcher.training.recording.phases import read_clock
from notebook_launcher.wording import unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from notebook_launcher.training.accumulation.members import Member, Members, PreparedModel
    from notebook_launcher.training.accumulation.weighing import Weighing
    from notebook_launcher.training.accumulation.windows import GradientState, Window
    from notebook_launcher.training.plugins import Rules
    from notebook_launcher.training.rank_check.check import RankCheck
    from notebook_launcher.training.recording.phases import PhaseClock
    from notebook_launcher.training.requests import Safepoint
    from notebook_launcher.training.user_warnings import Warner


# --------------------------------------------------------------------------------------------------------------------
# The backward of a micro-batch, and the blocks that hold one; `weighing.py` has the factor of its loss.


InReach: TypeAlias = "tuple[PreparedModel, list[int] | None]"
"""A model that a backward may reach, and the versions of its gradients before."""
LOSS_REDUCTIONS = ("mean", "sum")
"""Ways in which a loss combines its samples."""
MAX_BLOCKS = 16
"""Blocks that are kept: a loop that makes a new container for each micro-batch asks for a new one each time."""


@dataclasses.dataclass(kw_only=True, eq=False)
class MicroBatches:
    """The micro-batches of an Accelerator: their blocks and backwards."""

    gradient_state: GradientState
    members: Members
    rules: Rules
    weighing: Weighing
    """Gives the factors of losses, and corrects windows."""
    num_processes: int
    scaler: torch.amp.GradScaler | None
    """Scales fp16 losses; None in other precisions."""
    clock: PhaseClock | None
    """Times the phases, if a launcher listens."""
    safepoint: Safepoint | None
    """Saves and stops all ranks together, if a launcher may ask for it."""
    rank_check: RankCheck | None
    """Compares the ranks' weights now and then, if there are several ranks."""
    warn_once: Warner
    _has_stepped: bool = False
    """True if an optimizer has stepped since the last backward outside any block."""
    _blocks: dict[tuple[int, ...], tuple[tuple[Any, ...], MicroBatchBlock]] = dataclasses.field(default_factory=dict)
    """By the ids of the targets of `accumulate`: the targets, which are held so that no other object gets such an id,
    and their block."""
    _members_version: int = 0
    """Version of the members at which the blocks were made."""

    def __post_init__(self) -> None:
        self._initial = InitialGradient()
        """The initial gradient of the last backward, which is used again while the factor stays."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}  # The keys are ids, which belong to other objects in another process.

    def block(self, targets: tuple[Any, ...]) -> MicroBatchBlock:
        """Return the context in which one micro-batch of these models is computed."""
        if self._members_version != self.members.version:
            self.forget_blocks()
        known = self._blocks.get(tuple(map(id, targets)))
        block = self._make_block(targets) if known is None else known[1]
        if not block.free:  # To be entered inside itself.
            block = copy.copy(block)
            block.free = True
        return block

    def forget_blocks(self) -> None:
        """Forget the blocks, which hold the members that they were made for."""
        self._blocks.clear()
        self._members_version = self.members.version

    def _make_block(self, targets: tuple[Any, ...]) -> MicroBatchBlock:
        members = self.members.find(targets)
        block = MicroBatchBlock(members, self.gradient_state, self.rules, self.clock, self.safepoint, self.warn_once)
        if len(self._blocks) >= MAX_BLOCKS:
            self._blocks.clear()
        self._blocks[tuple(map(id, targets))] = targets, block
        return block

    def backward(self, loss: Any, weight: Any, reduction: str, kwargs: dict[str, Any]) -> None:
        """Compute gradients; at the end of a window they belong to the mean over the whole window."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex() or reduction != "mean":
            _check_loss(loss, reduction, weight, kwargs.get("gradient"))
        block, is_alone = self.gradient_state.block, self.num_processes == 1
        window: Window | None = None if block is None else block.window  # As `gradient_state.current`, without a call.
        if block is None:
            factor, ends = self._weigh_outside_blocks(weight, reduction), True
        else:
            factor = self.weighing.count_and_weigh(block, weight, reduction)
            ends = self.gradient_state.sync_gradients
        syncs = ends and not is_alone and waits_for_ranks(window, self.members)
        self.members.num_backwards += 1
        in_reach, check = () if is_alone else self._models_in_reach(), self.rank_check
        written = () if check is None else check.write(in_reach, window, syncs=syncs)
        ending = block if ends else None  # The block whose window ends with this micro-batch.
        pending = self.weighing.sum_weights(ending) if ending and ending.window.weights.kind == "given" else None
        self._compute(loss, factor, kwargs, window, syncs=syncs)
        if block is not None and not ends:
            block.window.gradients.note_written(block.members)
        # A call that comes after the wait for the other ranks takes about 1 µs: the processor has forgotten the code.
        for member, versions in in_reach:
            member.note_backward(versions, self.warn_once)
        if not is_alone and (self.members.leaves or self.members.shared_buffers):
            self._synchronise_others(ends=ends)
        if check is not None and check.is_pending:
            check.compare(written)
        if ending is not None and not ending.window.knows_its_weight:
            self.weighing.correct(ending, pending)
        if self.safepoint is not None:  # Before the phase ends: on GPUs it waits for the ranks, too.
            self._look_at(loss, factor, window, self.safepoint)
            self.safepoint.count(updated=ends and (syncs or is_alone))
        if self.clock is not None:
            self.clock.note(("synced backward" if syncs else "backward", read_clock()))

    def _look_at(
        self, loss: torch.Tensor, factor: float | torch.Tensor, window: Window | None, safepoint: Safepoint
    ) -> None:
        """Show a line about the first loss that is not finite, if its micro-batch counts.

        On a GPU this would wait for the loss: there `report(loss=loss)` looks at it, once it is on the CPU.
        """
        if not loss.is_cpu or type(loss) is not torch.Tensor or isfinite(value := loss.item()):
            return
        if not isinstance(factor, torch.Tensor) and not factor:
            return
        where = f"in update {safepoint.last_update + 1}"
        if window is not None and self.gradient_state.num_steps > 1:
            where += f", micro-batch {window.num_begun} of its window"
        loader = self.gradient_state.active_dataloader
        if loader is not None:
            where += f", batch {loader.num_drawn} of the data loader"
        notify_of_loss(value, where)

    def note_step(self) -> None:
        """Note that an optimizer has stepped: its phase ends, and a backward outside blocks is of the next update."""
        self._has_stepped = True
        clock = self.clock
        if clock is not None:
            now = read_clock()
            clock.note(("step", now))
            if now > clock.send_at:
                clock.attend(now, syncs=False)

    def note_local_training(self, model: Any, *, is_on: bool) -> None:
        """Note that `LocalSGD` has begun or ended: each rank steps with its own gradients of a model in between."""
        for member in self.members.inside(model):
            if member.notes is not None:
                member.notes.trains_alone = is_on
                member.notes.own_state = "LocalSGD"
        self.weighing.note_local_training()

    def note_average(self) -> None:
        """Note that `LocalSGD` has averaged: only there have all ranks made the same number of steps."""
        if self.safepoint is not None:
            self.safepoint.count(updated=True)

    def _weigh_outside_blocks(self, weight: Any, reduction: str) -> float | torch.Tensor:
        """Return the factor of a loss; save, change settings or stop first, where no loader does it."""
        safepoint, has_stepped, self._has_stepped = self.safepoint, self._has_stepped, False
        if has_stepped and safepoint is not None and safepoint.is_due and not self.gradient_state.in_dataloader:
            safepoint.act()
        if self.clock is not None and (self.num_processes == 1 or waits_for_ranks(None, self.members)):
            self.clock.note_window((1, 0.0))  # An update without `accumulate` is a window of its own.
        return self.weighing.factor_outside_blocks(weight, reduction)

    def _models_in_reach(self) -> Sequence[InReach]:
        """Return the models that this backward may reach, for ranks that watch which ones it does reach.

        The versions show which of several models a backward has reached. For a single model they are None: it has
        reached that one, and reading all versions would take time.
        """
        if not (self.rules.guards or self.rank_check is not None):
            return ()
        synced_models = self.members.synced_models
        if len(synced_models) == 1 and synced_models[0].notes.forwards:
            return [(synced_models[0], None)]
        return [
            (member, member.module.grad_versions())
            for member in synced_models
            if member.notes.forwards or member.notes.answered & FORWARD_SYNCED  # a forward, or one that is repeated
        ]

    def _compute(
        self,
        loss: torch.Tensor,
        factor: float | torch.Tensor,
        kwargs: dict[str, Any],
        window: Window | None,
        *,
        syncs: bool,
    ) -> None:
        """Compute the gradients; if that fails, the window is broken off."""
        clock, is_watched = self.clock, False
        try:
            if clock is not None:
                now = read_clock()
                clock.note(("forward", now))
                if now > clock.send_at or (syncs and now >= clock.watch_at):
                    is_watched = clock.attend(now, syncs=syncs)
            if is_watched and loss.requires_grad:
                loss.register_hook(self._mark_computed)
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            if kwargs and (given := kwargs.pop("gradient", None)) is not None:
                gradient = given * (factor.to(given) if isinstance(factor, torch.Tensor) else factor)
            else:
                gradient = self._initial.of(loss, factor)
            if isinstance(factor, torch.Tensor) or factor:
                backward(loss, gradient, kwargs)
            else:
                with without_sparse_rows(self.members.models_and_leaves):
                    backward(loss, gradient, kwargs)
            if is_watched and clock is not None:
                clock.end_watched()
        except BaseException:
            if window is not None:
                window.is_broken = True
            raise

    def _mark_computed(self, _: torch.Tensor) -> None:
        # Callbacks run in the order in which they were queued, and DDP queues its wait for the ranks later.
        assert self.clock is not None
        torch.autograd.Variable._execution_engine.queue_callback(self.clock.mark_computed)  # noqa: SLF001

    def _synchronise_others(self, *, ends: bool) -> None:
        """Synchronise what no module does: gradients of leaf tensors, and where a window ends, shared buffers."""
        if reduce_leaves(self.members.leaves):
            self.members.leaf_notes.num_synced += 1
        if not ends:
            return
        block = self.gradient_state.block
        for buffers in self.members.shared_buffers:
            if block is None or buffers.member in block.members:
                buffers.broadcast()


def _check_loss(loss: Any, reduction: str, weight: Any, gradient: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"backward({type(loss).__name__}): pass the loss, a tensor of one element.")
    if loss.numel() != 1:
        raise ValueError(
            f"backward(loss) with a loss of shape {tuple(loss.shape)}: a gradient needs one number. Take loss.mean()."
        )
    if loss.is_complex() and gradient is None:
        raise RuntimeError(
            f"backward(loss) with a loss of {loss.dtype}: gradients can be computed only for real scalar outputs. "
            "Take a real number of the loss, such as loss.real or loss.abs(), or pass gradient=."
        )
    if reduction not in LOSS_REDUCTIONS:
        raise ValueError(unknown("reduction", reduction, LOSS_REDUCTIONS, more=": how the loss combines its samples"))
    if reduction == "sum" and weight is None:
        raise ValueError("reduction='sum' needs weight=: the number of samples or tokens that the loss adds up.")


# --------------------------------------------------------------------------------------------------------------------
# The block of one micro-batch: before the forward it switches its members off, or not.


class MicroBatchBlock:
    """`with accelerator.accumulate(model):` around forward, backward and step of one micro-batch.

    `MicroBatches` describes the arguments besides the members. A block does not refer to the `MicroBatches` that keeps
    it: only the garbage collector would free such a cycle.
    """

    def __init__(
        self,
        members: list[Member],
        gradient_state: GradientState,
        rules: Rules,
        clock: PhaseClock | None,
        safepoint: Safepoint | None,
        warn_once: Warner,
    ) -> None:
        self._gradient_state, self._clock = gradient_state, clock
        self._safepoint, self._warn_once = safepoint, warn_once
        self.members = members
        self.free = True
        """False while the block is entered; a nested block is a copy."""
        self._rules = rules
        self.window = gradient_state.window_of(members)
        self._switchable = [member for member in members if member.switch_off is not SwitchOff.NEVER]
        """Members that a window may switch off."""
        first = (next((tensor for tensor in member.parameters() if tensor.requires_grad), None) for member in members)
        self.probes = [parameter for parameter in first if parameter is not None]
        """A trained parameter of each member: its version shows whether the weights were changed, and its gradient
        whether there are gradients. So no walk through the model is needed."""
        self.num_backwards = 0
        """Backwards of this micro-batch."""
        self.is_put_off = False
        """True if the window's update was put off, because this last micro-batch of it had no backward."""
        self._num_drawn = 0
        """Batches that the prepared loader had drawn when this block was last entered."""
        self._switched_off: list[tuple[Member, bool]] = []
        """Members that are switched off for this micro-batch, each with its state before."""
        self.outer: MicroBatchBlock | None = None
        """The block around this one."""

    def __enter__(self) -> None:
        gradient_state, window, loaders = self._gradient_state, self.window, self._gradient_state.active_loaders
        if loaders.active is None or loaders.are_several or loaders.active.num_drawn == self._num_drawn:
            if self._clock is not None and loaders.active is None:
                self._clock.mark("data")  # a prepared loader marks its waits itself
            context.step_boundary()  # Stops, if that was asked for, where no prepared loader has begun the micro-batch.
        else:  # The loop over the prepared loader has passed one.
            self._num_drawn = loaders.active.num_drawn
        if self._safepoint is not None and self._safepoint.is_due and window.num_begun == 0:
            self._safepoint.act()
        for left, num_steps, num_batches in gradient_state.enter(window, self.probes):
            for member in left.members or self.members:
                member.drop_gradients()
            self._warn_once(
                "abandoned",
                f"a window of {num_steps} micro-batches was left after {num_batches}, by a break, an exception or a "
                "last micro-batch without a backward: its gradients were dropped, so that they do not mix with the "
                "next window's.",
            )
        if gradient_state.loops.is_out_of_step and self._rules.guards:
            self._warn_of_reading()
        if window.num_begun > 1 and self._rules.guards:
            self._check_untouched()
        self.outer, gradient_state.block = gradient_state.block, self
        self.free = self.is_put_off = False
        self.num_backwards = 0
        if not gradient_state.sync_gradients and self._switchable:
            self._switched_off = switch_off(self._switchable, sync_each_batch=gradient_state.plugin.sync_each_batch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gradient_state, window = self._gradient_state, self.window
        if self._switched_off:
            switch_back(self._switched_off)
            self._switched_off = []
        self.free = True
        if gradient_state.sync_gradients and kind is None and self._clock is not None:
            if gradient_state.active_loaders.active is None:  # A prepared loader marks the end of a step itself.
                self._clock.note((None, read_clock()))
            self._clock.note_window((window.num_begun, window.weights.total))
        is_endless = not gradient_state.leave(self, failed=kind is not None)
        self.outer = None
        if is_endless:
            self._warn_once(
                "no end",
                "the last micro-batch of a loader had no backward, so the window has no end: its gradients are dropped."
                " Run its backward with weight=0, and pass weight= in all other backwards of the window, too.",
            )

    def _warn_of_reading(self) -> None:
        if self._gradient_state.loops.was_read_ahead:
            self._warn_once(
                "read ahead",
                "accumulate() is used after a loop that read all batches of the prepared loader, as list(loader) does. "
                "Outside the loop no batch is known to be the last, and all micro-batches weigh the same. Loop over "
                "the prepared loader itself, `for batch in loader:`; or pass weight=len(inputs) to backward, and end "
                "the last window yourself.",
            )
            return
        self._warn_once(
            "out of step",
            "accumulate() was entered without a new batch from the prepared loader: the loop reads ahead, or cuts a "
            "batch into several micro-batches. A window ends where the batch that was read last is the loader's last "
            "one, and micro-batches weigh as much as that batch. Read one batch for each accumulate(); or pass "
            "weight=len(inputs) to backward, and GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False) "
            "to the Accelerator.",
        )

    def _check_untouched(self) -> None:
        for probe, version in zip(self.probes, self.window.gradients.weight_versions, strict=False):
            if probe._version != version:  # noqa: SLF001
                self._warn_once(
                    "touched",
                    "the weights changed inside a window, before its update: was an optimizer stepped that prepare() "
                    "did not return? Write `model, optimizer = accelerator.prepare(model, optimizer)`: a prepared "
                    "optimizer steps where the window ends.",
                )


# --------------------------------------------------------------------------------------------------------------------
# The backward of a loss whose initial gradient is known: calls torch's engine without the checks of
# `Tensor.backward`.
#
# `Tensor.backward` makes or inspects the initial gradient and parses its arguments: a quarter of a small backward, 21
# of 91 µs. A loss of one element and an initial gradient of its own shape leave nothing to inspect, so this module
# calls the engine directly. The engine's function has no public name: if torch lacks it, or anything is unusual,
# `Tensor.backward` runs.


class InitialGradient:
    """The factor of a loss as a tensor, made again only if the factor changes."""

    _made: tuple[float, torch.Tensor] | None = None

    def of(self, loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """Return the gradient with which the backward of a loss of one element begins."""
        if isinstance(factor, torch.Tensor):
            return factor.to(loss).expand_as(loss)
        made = self._made
        if made is None or made[0] != factor or made[1].dtype != loss.dtype or made[1].device != loss.device:
            # `torch.tensor` would copy the number to the GPU, and wait for it.
            made = self._made = factor, torch.full((), factor, dtype=loss.dtype, device=loss.device)
        return made[1] if loss.dim() == 0 else made[1].expand_as(loss)


def backward(loss: torch.Tensor, gradient: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Run `loss.backward(gradient=gradient, **kwargs)`."""
    # Looked up at each call, because torch replaces the function while it traces.
    run_engine: Any = getattr(graph, "_engine_run_backward", None)
    is_plain = type(loss) is torch.Tensor and not torch._C._is_torch_function_mode_enabled()  # noqa: SLF001 - as above
    if kwargs or run_engine is None or not is_plain:
        loss.backward(gradient=gradient, **kwargs)
        return
    keep_graph = create_graph = False
    run_engine((loss,), (gradient,), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def without_sparse_rows(members: Iterable[Member]) -> Iterator[None]:
    """Leave out the rows of sparse gradients inside the block, which is for a micro-batch without weight.

    All of these rows are 0, and an optimizer such as SparseAdam moves every row that a gradient names.
    """
    parameters: Iterator[Any] = (parameter for member in members for parameter in member.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
    handles = [parameter.register_hook(_no_rows) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _no_rows(gradient: torch.Tensor) -> torch.Tensor | None:
    if not gradient.is_sparse:
        return None
    indices, values = gradient._indices()[:, :0], gradient._values()[:0]  # noqa: SLF001 - others need it coalesced
    return torch.sparse_coo_tensor(indices, values, gradient.size(), check_invariants=False)
