"""The block of one micro-batch: before the forward it switches its members off, or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher import context
from notebook_launcher.training.accumulation.members.member import SwitchOff
from notebook_launcher.training.accumulation.members.synchronisation import switch_back, switch_off
from notebook_launcher.training.recording.phases import read_clock

if TYPE_CHECKING:
    from types import TracebackType

    from notebook_launcher.training.accumulation.members.member import Member
    from notebook_launcher.training.accumulation.windows.gradient_state import Abandoned, GradientState
    from notebook_launcher.training.data.active_loaders import ActiveLoader
    from notebook_launcher.training.recording.phases import PhaseClock
    from notebook_launcher.training.requests.safepoint import Safepoint
    from notebook_launcher.training.rules import Rules
    from notebook_launcher.training.user_warnings import Warner

__all__ = ["MicroBatchBlock"]


class MicroBatchBlock:
    """`with accelerator.accumulate(model):` around forward, backward and step of one micro-batch.

    `MicroBatches` describes the arguments besides the members. A block does not refer to the `MicroBatches` that keeps
    it: only the garbage collector would free such a cycle.
    """

    __slots__ = (
        "_clock",
        "_gradient_state",
        "_num_drawn",
        "_rules",
        "_safepoint",
        "_switchable",
        "_switched_off",
        "_warn_once",
        "free",
        "members",
        "outer",
        "probes",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        members: list[Member],
        gradient_state: GradientState,
        rules: Rules,
        *,
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
        self.probes = [
            next((parameter for parameter in member.parameters() if parameter.requires_grad), None)
            for member in members
        ]
        """A trained parameter of each member: its version shows whether the weights were changed, and its gradient
        whether there are gradients. So no walk through the model is needed."""
        self._num_drawn = 0
        """Batches that the prepared loader had drawn when this block was last entered."""
        self._switched_off: list[tuple[Member, bool]] = []
        """Members that are switched off for this micro-batch, each with its state before."""
        self.outer: MicroBatchBlock | None = None
        """The block around this one."""

    def copy(self) -> MicroBatchBlock:
        """Return a block for the same models, to be entered inside this one."""
        twin = object.__new__(MicroBatchBlock)
        for name in MicroBatchBlock.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.free = True
        return twin

    def __enter__(self) -> None:
        gradient_state, window, loaders = self._gradient_state, self.window, self._gradient_state.active_loaders
        if loaders.active is None or loaders.are_several or loaders.active.num_drawn == self._num_drawn:
            self._pass_boundary(loaders.active)
        else:  # The loop over the prepared loader has passed one.
            self._num_drawn = loaders.active.num_drawn
        if self._safepoint is not None and self._safepoint.is_due and window.num_batches == 0:
            self._safepoint.act()
        for abandoned in gradient_state.enter(window, self.probes):
            self._drop(abandoned)
        if gradient_state.loops.is_out_of_step and self._rules.guards:
            self._warn_of_reading()
        if window.num_batches > 1 and self._rules.guards:
            self._check_untouched()
        self.outer, gradient_state.block = gradient_state.block, self
        self.free = False
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
        if not gradient_state.sync_gradients:
            if self._rules.guards and kind is None:
                self._check_untouched()
        elif kind is None and self._clock is not None:
            if gradient_state.active_loaders.active is None:  # A prepared loader marks the end of a step itself.
                self._clock.note((None, read_clock()))
            self._clock.note_window((window.num_batches, window.world_weight))
        is_endless = not gradient_state.leave(self, failed=kind is not None)
        self.outer = None
        if is_endless:
            self._warn_once(
                "no end",
                "the last micro-batch of a loader had no backward, so the window has no end: its gradients are dropped."
                " Run its backward with weight=0, and pass weight= in all other backwards of the window, too.",
            )

    def _pass_boundary(self, loader: ActiveLoader | None) -> None:
        """Stop, if that was asked for, before a micro-batch that no prepared loader has begun."""
        if self._clock is not None and loader is None:
            self._clock.mark("data")  # a prepared loader marks its waits itself
        context.step_boundary()

    def _drop(self, abandoned: Abandoned) -> None:
        """Drop the gradients of a window that was left before its end."""
        for member in abandoned.window.members or self.members:
            member.drop_gradients()
        self._warn_once(
            "abandoned",
            f"a window of {abandoned.num_steps} micro-batches was left after {abandoned.num_batches}, by a break, an "
            "exception or a last micro-batch without a backward: its gradients were dropped, so that they do not mix "
            "with the next window's.",
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
        for probe, version in zip(self.probes, self.window.weight_versions, strict=False):
            if probe is not None and probe._version != version:  # noqa: SLF001
                self._warn_once(
                    "touched",
                    "the weights changed inside a window, before its update: was an optimizer stepped that prepare() "
                    "did not return? Write `model, optimizer = accelerator.prepare(model, optimizer)`: a prepared "
                    "optimizer steps where the window ends.",
                )
