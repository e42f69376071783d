"""Exact accumulation: the backward that weighs a micro-batch, and the blocks that hold one.

In a window of micro-batches i with weights w_i, on all ranks together, the gradient of the mean loss is
sum(w_i * g_i) / sum(w_i). The sum of the weights is known only when the window ends. So each backward
is scaled as if the window were going to be full, by w_i / (num_steps * unit), and if it was not,
the gradients are corrected once, where the window ends. A full window of equal micro-batches needs no
correction, and its numbers equal `loss / num_steps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training.accumulation import gradients
from notebook_launcher.training.accumulation.blocks import MicroBatchBlock
from notebook_launcher.training.accumulation.correction import keep_or_read, ratio, rescale
from notebook_launcher.training.accumulation.given_weights import (
    as_total,
    checked_weight,
    has_sparse_gradients,
    one_if_used,
)
from notebook_launcher.training.accumulation.gradients import InitialGradient
from notebook_launcher.training.accumulation.synchronisation import reduce_leaves, waits_for_ranks
from notebook_launcher.training.accumulation.windows import has_values
from notebook_launcher.training.data.rounds import relative_weights
from notebook_launcher.training.plugins import Warner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.accumulation.gradient_state import GradientState
    from notebook_launcher.training.accumulation.member_kinds import PreparedModel
    from notebook_launcher.training.accumulation.members import Members
    from notebook_launcher.training.accumulation.windows import Window
    from notebook_launcher.training.parallelism.mesh import Layout
    from notebook_launcher.training.process.process_state import ProcessState
    from notebook_launcher.training.rank_check.check import RankCheck
    from notebook_launcher.training.recording.phases import PhaseClock
    from notebook_launcher.training.requests.safepoint import Safepoint
    from notebook_launcher.training.rules import Rules

__all__ = ["Accumulation"]

MOST_BLOCKS = 16
_ZIPPED = (
    "two prepared loaders are read side by side, and one of them has a batch that is not full where the other's is, "
    "such as its last one. A micro-batch weighs as many samples as the loader counted that was read last. Pass "
    "weight=, the number of samples that the loss is a mean over, to every backward."
)


class Accumulation:
    """The micro-batches of an Accelerator: their blocks and backwards."""

    def __init__(
        self,
        gradient_state: GradientState,
        members: Members,
        rules: Rules,
        process: ProcessState,
        layout: Layout,
        *,
        scaler: torch.amp.GradScaler | None,
        clock: PhaseClock | None,
        safepoint: Safepoint | None,
        check: RankCheck | None,
    ) -> None:
        """Take what a micro-batch needs.

        Args:
            gradient_state: Progress of accumulation.
            members: Models and tensors that are trained.
            rules: The differences from Accelerate.
            process: This process among its peers.
            layout: The ranks that read different data: their weights are added up.
            scaler: Scales fp16 losses; None in other precisions.
            clock: Times the phases, if a launcher listens.
            safepoint: Saves and stops all ranks together, if a launcher may ask for it.
            check: Compares the ranks' weights now and then, if there are several ranks.
        """
        self.gradient_state = gradient_state
        self.members = members
        self.scaler = scaler
        self.clock = clock
        self.safepoint = safepoint
        self.check = check
        self.is_in_closure = False
        """True while an optimizer calls its closure, which may compute the gradients several times."""
        self.is_local = False
        """True if every rank trains by itself (`LocalSGD`), so that its windows are means over its own samples."""
        self._has_stepped = False
        """True if an optimizer has stepped since the last backward outside any block."""
        self._device = process.device
        self._rules = rules
        self._num_processes = process.num_processes
        self._num_data_ranks = layout.num_data_ranks
        self._data_rank = layout.data_rank
        self._data_group = layout.data_group
        self.warn_once = Warner()
        self._initial = InitialGradient()

    def block(self, targets: tuple[Any, ...]) -> MicroBatchBlock:
        """Return the context in which one micro-batch of these models is computed."""
        known = self.members.looked_up.blocks.get(tuple(map(id, targets)))
        block: MicroBatchBlock = self._make_block(targets) if known is None else known[1]
        return block if block.free else block.copy()

    def _make_block(self, targets: tuple[Any, ...]) -> MicroBatchBlock:
        members = self.members.find(targets)
        block = MicroBatchBlock(self, members, self._rules)
        blocks = self.members.looked_up.blocks
        if len(blocks) >= MOST_BLOCKS:  # by a loop that makes a new container for each micro-batch
            blocks.clear()
        blocks[tuple(map(id, targets))] = targets, block
        return block

    def backward(self, loss: Any, weight: Any, reduction: str, kwargs: dict[str, Any]) -> None:
        """Compute gradients; at the end of a window they belong to the mean over the whole window."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or reduction != "mean":
            _check_loss(loss, reduction, weight)
        gradient_state, clock = self.gradient_state, self.clock
        # As `gradient_state.current`, without a call.
        window: Window | None = None if gradient_state.block is None else gradient_state.block.window
        weight = self._own_weight(window, weight)
        if window is None:
            self._act_between_updates()
            factor, ends = self._factor_outside_blocks(weight, reduction), True
        else:
            factor, ends = self._factor_in_window(window, weight, reduction), gradient_state.sync_gradients
        syncs = waits_for_ranks(window, self.members, ends=ends, num_processes=self._num_processes)
        is_watched = clock is not None and clock.begin_backward(syncs=syncs)
        check = self.check
        watched = self._watched() if self._num_processes > 1 and (self._rules.guards or check is not None) else ()
        written = () if check is None else check.write(watched)
        if check is not None and window is not None:
            check.left_out.write(window, watched, syncs=syncs)
        pending = self._sum_weights(window) if ends and window is not None and window.kind == "given" else None
        try:
            self._run(loss, factor, kwargs, is_watched=is_watched)
        except BaseException:
            if window is not None:
                window.break_off()
            raise
        self._note_gradients(window, watched, ends=ends)
        if check is not None:
            check.left_out.compare()
            check.compare(written)
        # A window of one micro-batch that all ranks can count needs no correction: its whole weight was known before.
        if ends and window is not None and (window.num_backwards != 1 or window.kind == "given"):
            self._correct(window, pending)
        if self.safepoint is not None:  # Before the phase ends: on GPUs it waits for the ranks, too.
            self.safepoint.count(updated=ends and (syncs or self._num_processes == 1))
        if clock is not None:
            clock.end_backward(synced=syncs)

    def note_step(self) -> None:
        """Note that an optimizer has stepped, so that a backward outside any block belongs to the next update."""
        self._has_stepped = True

    def _act_between_updates(self) -> None:
        """Save, change settings or stop where neither a block nor a loader begins the next micro-batch."""
        due = self._has_stepped and self.safepoint is not None and self.safepoint.is_due
        self._has_stepped = False
        if due and self.safepoint is not None and not self.gradient_state.in_dataloader:
            self.safepoint.act()

    def _run(
        self, loss: torch.Tensor, factor: float | torch.Tensor, kwargs: dict[str, Any], *, is_watched: bool
    ) -> None:
        if is_watched and loss.requires_grad:
            loss.register_hook(self._mark_computed)  # type: ignore[no-untyped-call]
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        # The factor is the initial gradient, which saves the two kernels of a multiplication in the graph.
        gradient = kwargs.pop("gradient", None)
        if gradient is None and loss.is_complex():
            raise RuntimeError(
                f"backward(loss) with a loss of {loss.dtype}: gradients can be computed only for real scalar outputs. "
                "Take a real number of the loss, such as loss.real or loss.abs(), or pass gradient=."
            )
        if gradient is None:
            gradient = self._initial.of(loss, factor)
        else:
            gradient = gradient * (factor.to(gradient) if isinstance(factor, torch.Tensor) else factor)
        if isinstance(factor, torch.Tensor) or factor:
            gradients.backward(loss, gradient, kwargs)
            return
        with gradients.without_sparse_rows(
            parameter for member in self.members.models_and_leaves for parameter in member.parameters()
        ):
            gradients.backward(loss, gradient, kwargs)

    def _mark_computed(self, _: torch.Tensor) -> None:
        # Callbacks run in the order in which they were queued, and DDP queues its wait for the ranks later.
        assert self.clock is not None
        torch.autograd.Variable._execution_engine.queue_callback(self.clock.mark_computed)  # noqa: SLF001

    def _factor_outside_blocks(self, weight: Any, reduction: str) -> float | torch.Tensor:
        """Return the factor of a loss outside any block."""
        num_steps = self.gradient_state.num_steps
        if self._rules.nominal_divisor:
            return 1.0 / num_steps
        if weight is not None:
            if num_steps > 1:
                raise ValueError(
                    f"backward(loss, weight={weight!r}) outside of accumulate() with gradient_accumulation_steps="
                    f"{num_steps}: the end of the window is unknown. Write `with accelerator.accumulate(model):` "
                    "around forward, backward and step."
                )
            mine = self._given_weight(weight)
            total = self._total(mine)
            return ratio(self._num_data_ranks * (mine if reduction == "mean" else one_if_used(mine)), total, 0.0)
        weights = self._round_weights()
        if weights is None or num_steps > 1:
            return 1.0 / num_steps
        return float(self._num_data_ranks * weights[self._data_rank] / (sum(weights) or 1))

    def _factor_in_window(self, window: Window, weight: Any, reduction: str) -> float | torch.Tensor:
        """Count the micro-batch in its window, and return the factor of its loss."""
        if self._rules.nominal_divisor:
            window.count_backward()
            return 1.0 / self.gradient_state.num_steps
        if not window.check_gathered() and self._rules.guards:
            self._warn_of_changed_gradients()
        if window.num_backwards == 0 and window.num_steps > 1 and self._rules.guards:
            self._warn_of_old_gradients()
        again = window.backwards_in_block > 0
        if again:
            self._warn_of_second_backward(window)
        if weight is None:
            mine: float | torch.Tensor = self._weigh_counted(window)
        else:
            mine = self._given_weight(weight)
            window.weigh("given", mine, 0.0, self._unit_of_given(mine))
            mine = mine if reduction == "mean" else one_if_used(mine)
        first_is_last = window.num_backwards == 1 and self.gradient_state.sync_gradients and window.kind != "given"
        if first_is_last:  # No gradient needs the correction yet, but a second backward of this block will.
            window.close(self._num_data_ranks)
            return self._num_data_ranks * mine / (window.world_weight or 1.0)
        factor = mine / (window.num_steps * window.unit)
        return factor * window.correction if again and self.gradient_state.sync_gradients else factor

    def _weigh_counted(self, window: Window) -> float:
        """Count a micro-batch by its samples; without a prepared loader, as a full micro-batch."""
        loader = self.gradient_state.stack.active
        weights = None if loader is None else self._round_weights()
        if loader is None or weights is None:
            mine = window.unit if window.kind == "counted" else 1.0
            window.weigh("equal", mine, mine * self._num_data_ranks, mine)
            return mine
        if loader.counts_otherwise and self._rules.guards and (window.num_steps > 1 or self._num_data_ranks > 1):
            self.warn_once("counts otherwise", loader.counts_otherwise)
        if self._rules.guards and any(
            relative_weights(other) != relative_weights(loader) for other in self.gradient_state.stack.in_step(loader)
        ):
            self.warn_once("zipped", _ZIPPED)
        full = float(loader.current_full_rows or max(loader.current_round.rows) or 1)
        unit = window.unit if window.kind == "counted" else full
        per_weight = full if window.kind == "equal" else 1.0
        mine = weights[self._data_rank] / per_weight
        window.weigh("counted", mine, sum(weights) / per_weight, unit)
        return mine

    def _own_weight(self, window: Window | None, weight: Any) -> Any:
        """Return a weight that this rank alone knows: the user's, or the rows of a ready batch; None: there is none."""
        loader = self.gradient_state.stack.active
        if weight is not None or loader is None or self._rules.nominal_divisor:
            return weight
        return None if window is None and self.gradient_state.num_steps > 1 else loader.current_rows

    def _given_weight(self, weight: Any) -> float | torch.Tensor:
        """Return the weight that the user gave; 0 for a repeated batch with which a rank only keeps step."""
        looked_up = self.members.looked_up
        if looked_up.has_sparse_gradients is None:
            looked_up.has_sparse_gradients = has_sparse_gradients(self.members.models_and_leaves)
        # A weight of 0 leaves the rows of sparse gradients out, so it must be known to be 0.
        value = checked_weight(weight, self._device, reads=looked_up.has_sparse_gradients)
        weights = self._round_weights()
        repeats = weights is not None and not weights[self._data_rank] and (self.is_local or any(weights))
        return 0.0 if repeats else value

    def _round_weights(self) -> tuple[int, ...] | None:
        loader = self.gradient_state.stack.active
        current = None if loader is None else loader.current_round
        if current is None or len(current.weights) != self._num_data_ranks:
            return None
        weights: tuple[int, ...] = current.weights
        if self.is_local:
            weights = (weights[self._data_rank],) * self._num_data_ranks
        if 0 in weights and loader is not None:
            loader.repeat_is_known = True
        return weights

    def _unit_of_given(self, weight: float | torch.Tensor) -> float:
        # In fp16 a loss that is weighed with thousands of tokens overflows, so weights are taken
        # in multiples of the first, which all ranks agree on once.
        if self.scaler is None:
            return 1.0
        if self.gradient_state.given_unit is None:
            self.gradient_state.given_unit = float(self._total(max(float(weight), 1.0))) / self._num_data_ranks
        return self.gradient_state.given_unit

    def _total(self, weight: float | torch.Tensor) -> float | torch.Tensor:
        if self._num_data_ranks == 1 or self.is_local:
            return self._num_data_ranks * weight
        total = as_total(weight, self._device)
        dist.all_reduce(total, group=self._data_group)
        return keep_or_read(total)

    def _sum_weights(self, window: Window) -> Any:
        """Begin the all-reduce of the weights that only their ranks know, beside the backward."""
        if self._num_data_ranks == 1 or self.is_local or window.backwards_in_block > 1:
            return None
        total = as_total(window.weight, self._device)
        return total, dist.all_reduce(total, group=self._data_group, async_op=True)

    def _correct(self, window: Window, pending: Any) -> None:
        """Rescale the gradients to the mean over the micro-batches that the window really held."""
        if self._rules.nominal_divisor or window.backwards_in_block > 1 or window.num_backwards == 0:
            return
        if pending is not None:
            pending[1].wait()
            window.close(self._num_data_ranks, keep_or_read(pending[0]))
        elif window.kind == "given":
            window.close(self._num_data_ranks, self._num_data_ranks * window.weight)
        else:
            window.close(self._num_data_ranks)
        named = (parameter for member in self.gradient_state.block.members for parameter in member.parameters())
        rescale([*named, *window.outside(window.joined)] if window.joined else named, window.correction)

    def correct_joined(self, window: Window) -> None:
        """Rescale the gradients of models that have joined the window after its last backward."""
        if window.num_backwards != 1 or window.kind == "given":
            rescale(window.outside(window.joined), window.correction)

    def _note_gradients(
        self, window: Window | None, watched: Sequence[tuple[PreparedModel, list[int] | None]], *, ends: bool
    ) -> None:
        """Note what this backward has gathered, and which gradients are the same on all ranks."""
        if window is not None and not ends:
            window.note_gathered(self.gradient_state.block.members)
        if self._num_processes > 1:
            self._note_reduced(watched)
            self._broadcast_buffers(window, ends=ends)

    def _note_reduced(self, watched: Sequence[tuple[PreparedModel, list[int] | None]]) -> None:
        """Note which models' gradients DDP has synchronised, and synchronise the gradients of leaf tensors."""
        for member, versions in watched:
            member.note_backward(versions, self.warn_once)
        if self.members.leaves and reduce_leaves(self.members.leaves):
            self.members.leaf_notes.num_synced += 1

    def _broadcast_buffers(self, window: Window | None, *, ends: bool) -> None:
        """Copy the buffers of sharded models from rank 0 to all ranks if the window ends."""
        if not ends:
            return
        for buffers in self.members.shared_buffers:
            if window is None or buffers.member in self.gradient_state.block.members:
                buffers.broadcast()

    def _watched(self) -> list[tuple[PreparedModel, list[int] | None]]:
        """Return the models that this backward may reach, each with the versions of its gradients before.

        The versions show which of several models a backward has reached. For a single model they are None: it has
        reached that one, and reading all versions would take time.
        """
        synced_models = self.members.synced_models
        if len(synced_models) == 1 and synced_models[0].notes.forwards:
            return [(synced_models[0], None)]
        return [(member, member.module.grad_versions()) for member in synced_models if member.may_be_reached]

    def _warn_of_old_gradients(self) -> None:
        """Warn if gradients are there before the first backward of a window: a short window would rescale them."""
        if any(probe is not None and has_values(probe.grad) for probe in self.gradient_state.block.probes):
            self.warn_once(
                "not fresh",
                "a window began with gradients that its models had already, from an update without zero_grad() or from "
                "another model's loss: they are added to the window's, and weighed with them where the window is "
                "short. Call optimizer.zero_grad() before the backward, or freeze a model through which another "
                "model's loss passes: discriminator.requires_grad_(False).",
            )

    def _warn_of_changed_gradients(self) -> None:
        self.warn_once(
            "changed",
            "gradients were changed between two micro-batches of a window, by another model's loss or by your code: "
            "the update uses the changed gradients. If a loss passes through a model that it does not train, freeze "
            "that model for this loss: discriminator.requires_grad_(False), and True again before the model's own "
            "backward. Change gradients where accelerator.sync_gradients is True.",
        )

    def _warn_of_second_backward(self, window: Window) -> None:
        if (
            self._rules.guards
            and not self.is_in_closure
            and window.backwards_in_block >= max(1, len(self.gradient_state.block.members))
        ):
            self.warn_once(
                "two backwards",
                "two backwards in one accumulate(): the block is one micro-batch, so their losses add up, and at the "
                "end of a window each one synchronises. Write backward(loss_a + loss_b), or a block for each "
                "micro-batch.",
            )


def _check_loss(loss: Any, reduction: str, weight: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"backward({type(loss).__name__}): pass the loss, a tensor of one element.")
    if loss.numel() != 1:
        raise ValueError(
            f"backward(loss) with a loss of shape {tuple(loss.shape)}: a gradient needs one number. Take loss.mean()."
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction={reduction!r} is unknown. It can be 'mean' or 'sum': how the loss combines its samples."
        )
    if reduction == "sum" and weight is None:
        raise ValueError("reduction='sum' needs weight=: the number of samples or tokens that the loss adds up.")
