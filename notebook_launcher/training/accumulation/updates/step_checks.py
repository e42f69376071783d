"""Refusals of a step whose gradients are not whole, or are one rank's alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.wording.text import first_few

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from notebook_launcher.training.accumulation.members.member import Member
    from notebook_launcher.training.accumulation.members.members import Members
    from notebook_launcher.training.accumulation.updates.optimizer import AcceleratedOptimizer
    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState
    from notebook_launcher.training.accumulation.windows.windows import Window
    from notebook_launcher.training.rank_check.check import RankCheck
    from notebook_launcher.training.user_warnings import Warner

__all__ = ["StepChecks"]


class StepChecks:
    """Checks the gradients of an optimizer before it steps.

    Args:
        gradient_state: The state of accumulation.
        members: Models and tensors that are trained.
        rank_check: Compares the ranks' weights; None if they are not compared.
        warn_once: Gives each warning once for each Accelerator.
    """

    def __init__(
        self, gradient_state: GradientState, members: Members, rank_check: RankCheck | None, warn_once: Warner
    ) -> None:
        self._gradient_state = gradient_state
        self._members = members
        self._rank_check = rank_check
        self._warn_once = warn_once

    def check_complete(self, prepared: AcceleratedOptimizer) -> None:
        """Raise RuntimeError if another window than the current one gathers gradients that this step would use."""
        gradient_state = self._gradient_state
        if len(gradient_state.windows) < 2:
            return
        owned = self._members.of_optimizer(prepared.optimizer)
        for key, window in gradient_state.windows.items():
            if window is not gradient_state.current and window.num_backwards and key and window.holds(owned):
                raise RuntimeError(
                    f"step(): this {type(prepared.optimizer).__name__} also updates models whose window is still open, "
                    f"with {window.num_batches} of {window.num_steps} micro-batches. Pass all models of an optimizer "
                    "to the same accumulate(), as in accumulate(encoder, decoder), or give each model an optimizer."
                )

    def check_window(self, window: Window, closure: Callable[[], Any] | None) -> None:
        """Raise ValueError for a closure in a window of several micro-batches; warn of a backward of torch's own."""
        gradient_state = self._gradient_state
        if closure is not None and (window.num_batches > 1 or not gradient_state.sync_gradients):
            raise ValueError(
                f"step(closure) in a window of {window.num_steps} micro-batches: the closure computes one of them, and "
                "the step needs the gradient of all. Call backward(loss) before step(), without a closure; LBFGS "
                "and others that call their closure again need gradient_accumulation_steps=1."
            )
        lacks_backward = closure is None and window.num_steps > 1 and window.backwards_in_block == 0
        block = gradient_state.block
        if lacks_backward and block is not None and window.has_unnoted_gradients(block.members):
            self._note_foreign(window)

    def check_clearing(self, window: Window) -> None:
        """Note a backward of torch's own before a `zero_grad()` inside a window, which then keeps the gradients."""
        block = self._gradient_state.block
        if window.num_steps > 1 and block is not None and window.has_gained_gradients(block.probes):
            self._note_foreign(window)

    def _note_foreign(self, window: Window) -> None:
        window.note_foreign()
        self._warn_once(
            "backward of torch",
            "a micro-batch of accumulate() has gradients and called no accelerator.backward(loss). loss.backward() "
            f"alone adds the {window.num_steps} micro-batches of a window up: that is their mean only if the loss "
            "is divided by their number, and if they are of equal size. Write accelerator.backward(loss), and do "
            "not divide.",
        )

    def check_synced(self, prepared: AcceleratedOptimizer) -> None:
        """Raise RuntimeError if gradients of this optimizer are one rank's alone, unless `LocalSGD` wants that."""
        owned = self._members.owned_by(prepared.optimizer)
        for member in owned.members:
            notes = member.notes
            if notes is not None and notes.trains_alone:
                return
            if not member.is_synced and member.has_gradients():
                if notes is None or not self._members.are_set_by_hand(notes):
                    raise RuntimeError(
                        f"step(): the gradients of {member.describe()} were not synchronised, so the ranks' weights "
                        f"would diverge. {member.explain_unsynced()}"
                    )
                self._check_foreign(member)
            elif notes is not None and not notes.answered:
                self._check_foreign(member)
        if owned.local and (local := [parameter for parameter in owned.local if parameter.grad is not None]):
            raise RuntimeError(_describe_local(prepared.optimizer, local, self._members))
        if self._rank_check is not None:
            self._rank_check.forgotten.checked = id(prepared.optimizer)

    def forget_step(self) -> None:
        """Look at the next step again, because an overflow may have left out the step that was checked."""
        if self._rank_check is not None:
            self._rank_check.forgotten.checked = None

    def _check_foreign(self, member: Member) -> None:
        """Have the ranks compare gradients that no backward of the Accelerator has computed, now and then."""
        if self._rank_check is not None and member.has_gradients():
            self._rank_check.gradients.compare(member)


def _describe_local(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], members: Members) -> str:
    """Return the message that nothing synchronises these parameters, and why."""
    mine = {id(parameter) for parameter in parameters}
    inside = [model for model in members.models if any(id(parameter) in mine for parameter in model.parameters())]
    shapes = first_few([str(tuple(parameter.shape)) for parameter in parameters])
    if inside:
        name = type(getattr(inside[0], "module", inside[0])).__name__
        why = (
            f"were frozen, or not yet part of the {name}, when prepare() wrapped it. Unfreeze or add them first and "
            "call prepare() then, after accelerator.free_memory() if it was called for this model before; for stages "
            "that train other layers, give DistributedDataParallelKwargs(find_unused_parameters=True) and freeze after "
            "prepare()."
        )
    else:
        why = (
            "belong to no model that prepare() was given. Write `model, optimizer = accelerator.prepare(model, "
            "optimizer)`, with each model and leaf tensor that the optimizer updates. Prepare the model to average "
            "gradients by hand, too."
        )
    return (
        f"step(): nothing synchronised the gradients of {len(parameters)} parameters of this "
        f"{type(optimizer).__name__} (shapes {shapes}), so the ranks' weights "
        f"would diverge: they {why}"
    )
