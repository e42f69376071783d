"""The end of a window: prepared optimizers clip and step, there and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.accumulation.members import parameters_of
from notebook_launcher.training.accumulation.optimizer import GradientScaling, clip_norm_, clip_value_, given_parameters
from notebook_launcher.training.plugins import check_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from notebook_launcher.training.accumulation.gradient_state import GradientState
    from notebook_launcher.training.accumulation.member_kinds import Member
    from notebook_launcher.training.accumulation.members import Members
    from notebook_launcher.training.accumulation.optimizer import AcceleratedOptimizer, LiveOptimizers, StepChecks
    from notebook_launcher.training.accumulation.weighing import Weighing
    from notebook_launcher.training.accumulation.windows import Window
    from notebook_launcher.training.plugins import Rules


class Updates:
    """The updates of an Accelerator's prepared optimizers.

    Args:
        gradient_state: The state of accumulation.
        members: Models and tensors that are trained.
        optimizers: The prepared optimizers.
        rules: The differences from Accelerate.
        weighing: Corrects windows.
        checks: Refuses steps whose gradients are not whole.
        num_processes: Ranks that train together.
        max_grad_norm: Clip the gradients to this total norm before each step; None: do not.
        scaler: Scales fp16 losses; None in other precisions.
        note_step: Called after each step.
        present: Returns the parameters that are trained now, for those of a list from before the model was sharded.
    """

    def __init__(
        self,
        gradient_state: GradientState,
        members: Members,
        optimizers: LiveOptimizers,
        rules: Rules,
        weighing: Weighing,
        checks: StepChecks,
        *,
        num_processes: int,
        max_grad_norm: float | None,
        scaler: torch.amp.GradScaler | None,
        note_step: Callable[[], None],
        present: Callable[..., Any],
    ) -> None:
        self.optimizers = optimizers
        self.present = present
        """Returns the parameters that are trained now."""
        self.max_grad_norm = max_grad_norm
        self.last_grad_norm: torch.Tensor | None = None
        """The total norm before the last clipping."""
        self.steps_made = 0
        """Steps of all prepared optimizers so far, skipped ones included."""
        self._gradient_state = gradient_state
        self._members = members
        self._rules = rules
        self._weighing = weighing
        self._checks = checks
        self._num_processes = num_processes
        self._scaler = scaler
        self._note_step = note_step
        self.scaling = GradientScaling(scaler, gradient_state, optimizers)
        """The steps with scaled gradients, in fp16."""

    def parameters_changed(self) -> None:
        """Have the members of each optimizer looked up again."""
        self._members.changed()

    def observe(self) -> dict[str, Any]:
        """Return `learning_rate`, of each optimizer's first group, and `grad_norm` if gradients are clipped."""
        groups = [group for prepared in self.optimizers for group in prepared.param_groups[:1]]
        rates = [group["lr"] for group in groups if "lr" in group]
        named = {f"learning_rate_{number}" if number else "learning_rate": rate for number, rate in enumerate(rates)}
        return {**named, "grad_norm": self.last_grad_norm} if self.last_grad_norm is not None else named

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for prepared in self.optimizers:  # each leaves its Updates out, so that it pickles by itself
            prepared._updates = self  # noqa: SLF001 - ours

    def step(self, prepared: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Step where the window ends; return the result of the optimizer, and True if the step was skipped."""
        gradient_state = self._gradient_state
        block = gradient_state.block
        window = None if block is None else block.window  # As `gradient_state.current`, without a call.
        if self._rules.guards and window is not None:
            self._check_window(prepared, window, closure)
        if not gradient_state.sync_gradients or self._puts_off(window):
            return None, prepared.step_was_skipped
        if self._rules.guards:
            if len(gradient_state.windows) > 1:
                self._checks.check_complete(prepared)
            if self._num_processes > 1:
                self._checks.check_synced(prepared)
        optimizer: Any = prepared.optimizer
        if closure is None and self._scaler is None and self.max_grad_norm is None:
            outcome, skipped = optimizer.step(), prepared.step_was_skipped
        else:
            outcome, skipped = self._step_with_more(prepared, closure)
            self._checks.forget_step()
        self.steps_made += 1
        if window is not None:
            window.note_step()
        self._note_step()
        return outcome, skipped

    def _step_with_more(self, prepared: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Step with a closure, a scaler or clipping."""
        if self.max_grad_norm is not None and closure is not None:
            closure = self._clipping(closure, prepared, self.max_grad_norm)
        elif self.max_grad_norm is not None:
            self._clip(parameters_of(prepared), self.max_grad_norm, 2.0, [prepared])
        if self._scaler is not None:
            return self.scaling.step(prepared, closure)
        optimizer: Any = prepared.optimizer
        if closure is None:
            return optimizer.step(), prepared.step_was_skipped
        with self._weighing.in_closure():
            return optimizer.step(closure), prepared.step_was_skipped

    def _check_window(self, prepared: AcceleratedOptimizer, window: Window, closure: Callable[[], Any] | None) -> None:
        """Check a step inside `accumulate`, and let models join its window."""
        if closure is not None or window.backwards_in_block == 0:
            self._checks.check_window(window, closure)
        covered, key = self._members.looked_up.covered, (id(prepared), id(window))
        if window.num_backwards and key not in covered:
            owned = self._members.of_optimizer(prepared.optimizer)
            if owned and all(id(member) in window.key for member in owned):
                covered.add(key)
            else:
                self._join(owned, window)

    def _join(self, members: Sequence[Member], window: Window) -> None:
        """Let models that a block steps or clips belong to its window, if `accumulate` was given other models only.

        In `with accumulate(head)` both `encoder_optimizer.step()` and its `zero_grad()` then wait for the window's end,
        and the gradients get the window's correction.
        """
        if window.holds(members):
            # The optimizer of the window's models trains others, too: those that the window's backwards have reached.
            members = [member for member in members if not window.holds([member]) and member.has_gradients()]
        if not members:
            return
        others = [other for other in self._gradient_state.windows.values() if other is not window]
        if any(other.num_backwards and other.holds(members) for other in others):
            return
        window.join(members)
        if self._gradient_state.sync_gradients:
            # The window has ended, and has corrected the models that it knew.
            self._weighing.correct_joined(window, members)

    def _puts_off(self, window: Window | None) -> bool:
        """Put the update off, and return True, if the window has not ended: its last micro-batch was left out."""
        gradient_state = self._gradient_state
        if window is None or window.backwards_in_block or not gradient_state.lacks_end(window):
            return False
        gradient_state.put_off(window)
        return True

    def may_clear(self, prepared: AcceleratedOptimizer) -> bool:
        """Return True if `zero_grad()` clears; the gradients then count as not synchronised."""
        gradient_state = self._gradient_state
        if self._rules.zero_grad_drops_window:
            return gradient_state.sync_gradients
        if gradient_state.loaded:
            return False
        block, ends = gradient_state.block, gradient_state.sync_gradients
        current = None if block is None else block.window
        gathers = current is not None and current.num_backwards and not ends
        if gathers and (id(prepared), id(current)) in self._members.looked_up.covered:
            return False
        if current is not None and not (current.num_backwards or current.has_foreign or current.has_stepped):
            self._checks.check_clearing(current)
        lookup = self._members.owned_by(prepared.optimizer)
        owned, shared = lookup.members, lookup.shared
        if self._are_gathered(owned, current if ends else None):
            return False
        for member in owned:
            # Gradients that another optimizer has not used yet are still those of the last backward.
            if not shared or all(parameter.grad is None for parameter in shared.get(id(member), ())):
                member.clear_synced()
        if current is not None and not ends and current.holds(owned):
            current.note_cleared()
        self._members.num_backwards = 0
        return True

    def _are_gathered(self, owned: Sequence[Member], ended: Window | None) -> bool:
        """Return True if a window has gathered gradients of these members that no step has used.

        Args:
            owned: Members of an optimizer.
            ended: The window of this micro-batch, if it ends here.
        """
        for window in self._gradient_state.windows.values():
            if not (window.num_backwards or window.has_foreign):
                continue
            if window is ended and (window.backwards_in_block or window.has_stepped):
                continue
            if window.holds(owned):
                return True
        return False

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Clip the gradients where a window ends; inside a window do nothing and return None."""
        check_limit("max_norm", max_norm)
        if not self._clips_now():
            return None
        parameters = self._all_corrected(self.present(given_parameters(parameters)))
        return self._clip(parameters, max_norm, norm_type, self.optimizers)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """Clip each element, where a window ends."""
        check_limit("clip_value", clip_value)
        if self._clips_now():
            parameters = self._all_corrected(self.present(given_parameters(parameters)))
            self.scaling.unscale(self.optimizers)
            clip_value_(parameters, clip_value)

    def _clips_now(self) -> bool:
        """Return True where a window ends; by Accelerate's rules also inside a window."""
        gradient_state = self._gradient_state
        is_wanted = gradient_state.sync_gradients or self._rules.clip_inside_window
        return is_wanted and not self._puts_off(gradient_state.current)

    def _all_corrected(self, parameters: Any) -> Any:
        """Return the parameters that are to be clipped, after their models have joined the window that has ended."""
        window = self._gradient_state.current
        if window is None or not self._rules.guards or (type(window.correction) is float and window.correction == 1.0):
            return parameters
        listed = list(given_parameters(parameters))
        clipped = set(map(id, listed))
        for member in self._members.models_and_leaves:
            if not window.holds([member]) and any(id(parameter) in clipped for parameter in member.parameters()):
                self._join([member], window)
        return listed

    def _clip(
        self, parameters: Any, max_norm: float, norm_type: float, optimizers: Iterable[AcceleratedOptimizer]
    ) -> torch.Tensor:
        self.scaling.unscale(optimizers)
        norm = self.last_grad_norm = clip_norm_(parameters, max_norm, norm_type)
        return norm

    def _clipping(
        self, closure: Callable[[], Any], prepared: AcceleratedOptimizer, max_norm: float
    ) -> Callable[[], Any]:
        """Return the closure of a step, with its gradients clipped each time that it has computed them."""

        def compute() -> Any:
            loss = closure()
            self._clip(parameters_of(prepared), max_norm, 2.0, [prepared])
            return loss

        return compute

    def clear(self) -> None:
        """Release the optimizers."""
        self.optimizers.clear()
        self.scaling.clear()
