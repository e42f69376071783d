"""The backward of a micro-batch, and the blocks that hold one; `weighing.py` has the factor of its loss."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from notebook_launcher.context import notify_of_loss
from notebook_launcher.training.accumulation.members.synchronisation import reduce_leaves, waits_for_ranks
from notebook_launcher.training.accumulation.micro_batches import gradients
from notebook_launcher.training.accumulation.micro_batches.blocks import MicroBatchBlock
from notebook_launcher.training.accumulation.micro_batches.gradients import InitialGradient
from notebook_launcher.training.recording.phases import read_clock
from notebook_launcher.wording.choices import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.accumulation.members.member_kinds import PreparedModel
    from notebook_launcher.training.accumulation.members.members import Members
    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState
    from notebook_launcher.training.accumulation.windows.weighing import Weighing
    from notebook_launcher.training.accumulation.windows.windows import Window
    from notebook_launcher.training.rank_check.check import RankCheck
    from notebook_launcher.training.recording.phases import PhaseClock
    from notebook_launcher.training.requests.safepoint import Safepoint
    from notebook_launcher.training.rules import Rules
    from notebook_launcher.training.user_warnings import Warner

__all__ = ["MicroBatches"]

InReach: TypeAlias = "tuple[PreparedModel, list[int] | None]"
"""A model that a backward may reach, and the versions of its gradients before."""
LOSS_REDUCTIONS = ("mean", "sum")
"""Ways in which a loss combines its samples."""
MAX_BLOCKS = 16
"""Blocks that are kept: a loop that makes a new container for each micro-batch asks for a new one each time."""


class MicroBatches:
    """The micro-batches of an Accelerator: their blocks and backwards.

    Args:
        gradient_state: The state of accumulation.
        members: Models and tensors that are trained.
        rules: The differences from Accelerate.
        weighing: Gives the factors of losses, and corrects windows.
        num_processes: Ranks that train together.
        scaler: Scales fp16 losses; None in other precisions.
        clock: Times the phases, if a launcher listens.
        safepoint: Saves and stops all ranks together, if a launcher may ask for it.
        rank_check: Compares the ranks' weights now and then, if there are several ranks.
        warn_once: Gives each warning once for each Accelerator.
    """

    def __init__(
        self,
        gradient_state: GradientState,
        members: Members,
        rules: Rules,
        weighing: Weighing,
        *,
        num_processes: int,
        scaler: torch.amp.GradScaler | None,
        clock: PhaseClock | None,
        safepoint: Safepoint | None,
        rank_check: RankCheck | None,
        warn_once: Warner,
    ) -> None:
        self._gradient_state = gradient_state
        self._members = members
        self.scaler = scaler
        self._clock = clock
        self._safepoint = safepoint
        self._rank_check = rank_check
        self._weighing = weighing
        self._warn_once = warn_once
        self._has_stepped = False
        """True if an optimizer has stepped since the last backward outside any block."""
        self._rules = rules
        self._num_processes = num_processes
        self._initial = InitialGradient()
        """The initial gradient of the last backward, which is used again while the factor stays."""
        self._blocks: dict[tuple[int, ...], tuple[tuple[Any, ...], MicroBatchBlock]] = {}
        """By the ids of the targets of `accumulate`: the targets, which are held so that no other object gets such an
        id, and their block."""
        self._members_version = members.version
        """Version of the members at which the blocks were made."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}  # The keys are ids, which belong to other objects in another process.

    def block(self, targets: tuple[Any, ...]) -> MicroBatchBlock:
        """Return the context in which one micro-batch of these models is computed."""
        if self._members_version != self._members.version:
            self.forget_blocks()
        known = self._blocks.get(tuple(map(id, targets)))
        block = self._make_block(targets) if known is None else known[1]
        return block if block.free else block.copy()

    def forget_blocks(self) -> None:
        """Forget the blocks, which hold the members that they were made for."""
        self._blocks.clear()
        self._members_version = self._members.version

    def _make_block(self, targets: tuple[Any, ...]) -> MicroBatchBlock:
        members = self._members.find(targets)
        block = MicroBatchBlock(
            members,
            self._gradient_state,
            self._rules,
            clock=self._clock,
            safepoint=self._safepoint,
            warn_once=self._warn_once,
        )
        if len(self._blocks) >= MAX_BLOCKS:
            self._blocks.clear()
        self._blocks[tuple(map(id, targets))] = targets, block
        return block

    def backward(self, loss: Any, weight: Any, reduction: str, kwargs: dict[str, Any]) -> None:
        """Compute gradients; at the end of a window they belong to the mean over the whole window."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or reduction != "mean":
            _check_loss(loss, reduction, weight)
        block = self._gradient_state.block
        window: Window | None = None if block is None else block.window  # As `gradient_state.current`, without a call.
        factor, ends, syncs = self._weigh(window, weight, reduction)
        if self._clock is not None:
            self._clock.note(("forward", read_clock()))
        self._members.num_backwards += 1
        in_reach, check = self._models_in_reach(), self._rank_check
        written = () if check is None else check.write(in_reach, window, syncs=syncs)
        ending = window if ends else None  # The window that ends with this micro-batch.
        pending = None if ending is None or ending.kind != "given" else self._weighing.sum_weights(ending)
        self._compute(loss, factor, kwargs, window, syncs=syncs)
        if block is not None and not ends:
            block.window.note_gathered(block.members)
        # A call that comes after the wait for the other ranks takes about 1 µs: the processor has forgotten the code.
        for member, versions in in_reach:
            member.note_backward(versions, self._warn_once)
        if self._num_processes > 1 and (self._members.leaves or self._members.shared_buffers):
            self._synchronise_others(ends=ends)
        if check is not None and check.is_pending:
            check.compare(written)
        if ending is not None and not ending.knows_its_weight:
            self._weighing.correct(ending, pending)
        if self._safepoint is not None:  # Before the phase ends: on GPUs it waits for the ranks, too.
            self._look_at(loss, factor, window, self._safepoint)
            self._safepoint.count(updated=ends and (syncs or self._num_processes == 1))
        if self._clock is not None:
            self._clock.note(("synced backward" if syncs else "backward", read_clock()))

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
        where = f"in update {safepoint.num_updates + 1}"
        if window is not None and self._gradient_state.num_steps > 1:
            where += f", micro-batch {window.num_batches} of its window"
        loader = self._gradient_state.active_dataloader
        if loader is not None:
            where += f", batch {loader.num_drawn} of the data loader"
        notify_of_loss(value, where)

    def note_step(self) -> None:
        """Note that an optimizer has stepped: its phase ends, and a backward outside blocks is of the next update."""
        self._has_stepped = True
        clock = self._clock
        if clock is not None:
            now = read_clock()
            clock.note(("step", now))
            if now > clock.send_at:
                clock.attend(now, syncs=False)

    def note_local_training(self, model: Any, *, is_on: bool) -> None:
        """Note that `LocalSGD` has begun or ended: each rank steps with its own gradients of a model in between."""
        for member in self._members.inside(model):
            if member.notes is not None:
                member.notes.trains_alone = is_on
                member.notes.own_state = "LocalSGD"
        self._weighing.note_local_training()

    def note_average(self) -> None:
        """Note that `LocalSGD` has averaged: only there have all ranks made the same number of steps."""
        if self._safepoint is not None:
            self._safepoint.count(updated=True)

    def _weigh(self, window: Window | None, weight: Any, reduction: str) -> tuple[float | torch.Tensor, bool, bool]:
        """Return the factor of the loss, True if an update may follow, and True if the backward waits for the ranks."""
        if window is None:
            self._act_between_updates()
            factor, ends = self._weighing.factor_outside_blocks(weight, reduction), True
        else:
            factor = self._weighing.count_and_weigh(window, weight, reduction)
            ends = self._gradient_state.sync_gradients
        syncs = ends and self._num_processes > 1 and waits_for_ranks(window, self._members)
        if window is None and self._clock is not None and (syncs or self._num_processes == 1):
            self._clock.note_window((1, 0.0))  # An update without `accumulate` is a window of its own.
        return factor, ends, syncs

    def _act_between_updates(self) -> None:
        """Save, change settings or stop where neither a block nor a loader begins the next micro-batch."""
        due = self._has_stepped and self._safepoint is not None and self._safepoint.is_due
        self._has_stepped = False
        if due and self._safepoint is not None and not self._gradient_state.in_dataloader:
            self._safepoint.act()

    def _models_in_reach(self) -> Sequence[InReach]:
        """Return the models that this backward may reach, for ranks that watch which ones it does reach.

        The versions show which of several models a backward has reached. For a single model they are None: it has
        reached that one, and reading all versions would take time.
        """
        if self._num_processes == 1 or not (self._rules.guards or self._rank_check is not None):
            return ()
        synced_models = self._members.synced_models
        if len(synced_models) == 1 and synced_models[0].notes.forwards:
            return [(synced_models[0], None)]
        return [(member, member.module.grad_versions()) for member in synced_models if member.may_be_reached]

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
        clock, is_watched = self._clock, False
        try:
            if clock is not None and ((now := read_clock()) > clock.send_at or (syncs and now >= clock.watch_at)):
                is_watched = clock.attend(now, syncs=syncs)
            if is_watched and loss.requires_grad:
                loss.register_hook(self._mark_computed)  # type: ignore[no-untyped-call]
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            if kwargs or loss.is_complex():
                gradient = self._initial_gradient(loss, factor, kwargs.pop("gradient", None))
            else:
                gradient = self._initial.of(loss, factor)
            if isinstance(factor, torch.Tensor) or factor:
                gradients.backward(loss, gradient, kwargs)
            else:
                self._compute_without_weight(loss, gradient, kwargs)
            if is_watched and clock is not None:
                clock.end_watched()
        except BaseException:
            if window is not None:
                window.break_off()
            raise

    def _compute_without_weight(self, loss: torch.Tensor, gradient: torch.Tensor, kwargs: dict[str, Any]) -> None:
        trained = (parameter for member in self._members.models_and_leaves for parameter in member.parameters())
        with gradients.without_sparse_rows(trained):
            gradients.backward(loss, gradient, kwargs)

    def _initial_gradient(self, loss: torch.Tensor, factor: float | torch.Tensor, given: Any) -> torch.Tensor:
        """Return the factor as the initial gradient, which saves the two kernels of a multiplication in the graph.

        Args:
            loss: The loss, scaled.
            factor: Its factor.
            given: The `gradient` that the user passed to `backward`, or None.
        """
        if given is not None:
            return given * (factor.to(given) if isinstance(factor, torch.Tensor) else factor)  # type: ignore[no-any-return]
        if loss.is_complex():
            raise RuntimeError(
                f"backward(loss) with a loss of {loss.dtype}: gradients can be computed only for real scalar outputs. "
                "Take a real number of the loss, such as loss.real or loss.abs(), or pass gradient=."
            )
        return self._initial.of(loss, factor)

    def _mark_computed(self, _: torch.Tensor) -> None:
        # Callbacks run in the order in which they were queued, and DDP queues its wait for the ranks later.
        assert self._clock is not None
        torch.autograd.Variable._execution_engine.queue_callback(self._clock.mark_computed)  # noqa: SLF001

    def _synchronise_others(self, *, ends: bool) -> None:
        """Synchronise what no module does: gradients of leaf tensors, and where a window ends, shared buffers."""
        if reduce_leaves(self._members.leaves):
            self._members.leaf_notes.num_synced += 1
        if not ends:
            return
        block = self._gradient_state.block
        for buffers in self._members.shared_buffers:
            if block is None or buffers.member in block.members:
                buffers.broadcast()


def _check_loss(loss: Any, reduction: str, weight: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"backward({type(loss).__name__}): pass the loss, a tensor of one element.")
    if loss.numel() != 1:
        raise ValueError(
            f"backward(loss) with a loss of shape {tuple(loss.shape)}: a gradient needs one number. Take loss.mean()."
        )
    if reduction not in LOSS_REDUCTIONS:
        raise ValueError(unknown("reduction", reduction, LOSS_REDUCTIONS, more=": how the loss combines its samples"))
    if reduction == "sum" and weight is None:
        raise ValueError("reduction='sum' needs weight=: the number of samples or tokens that the loss adds up.")
