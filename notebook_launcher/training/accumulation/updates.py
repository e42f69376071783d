"""The end of a window: unscale, clip, step, and the refusal to step with gradients of one rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.accumulation.clipping import clip_norm_, clip_value_, given_parameters
from notebook_launcher.training.accumulation.correction import rescale
from notebook_launcher.training.accumulation.targets import parameters_of
from notebook_launcher.training.argument_checks import check_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.training.accumulation.backward import Accumulation
    from notebook_launcher.training.accumulation.member_kinds import Member
    from notebook_launcher.training.accumulation.members import Members
    from notebook_launcher.training.accumulation.optimizer import AcceleratedOptimizer
    from notebook_launcher.training.accumulation.windows import Window
    from notebook_launcher.training.rules import Rules

__all__ = ["LiveOptimizers", "Updates"]


class LiveOptimizers:
    """The prepared optimizers that are in use, in order.

    They are held weakly: each optimizer refers to its `Updates`, and a strong reference back would be a cycle that only
    the garbage collector frees.
    """

    def __init__(self, optimizers: Iterable[AcceleratedOptimizer] = ()) -> None:
        self._refs = [weakref.ref(prepared) for prepared in optimizers]

    def __iter__(self) -> Iterator[AcceleratedOptimizer]:
        return (prepared for prepared in (ref() for ref in self._refs) if prepared is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, prepared: AcceleratedOptimizer) -> None:
        """Add an optimizer."""
        self._refs.append(weakref.ref(prepared))

    def clear(self) -> None:
        """Forget all optimizers."""
        self._refs.clear()

    def __reduce__(self) -> tuple[type[LiveOptimizers], tuple[list[AcceleratedOptimizer]]]:
        return LiveOptimizers, (list(self),)


class Updates:
    """The updates of an Accelerator's prepared optimizers."""

    def __init__(
        self,
        accumulation: Accumulation,
        optimizers: LiveOptimizers,
        rules: Rules,
        *,
        num_processes: int,
        max_grad_norm: float | None,
    ) -> None:
        self.optimizers = optimizers
        self.max_grad_norm = max_grad_norm
        self.last_grad_norm: torch.Tensor | None = None
        """The total norm before the last clipping."""
        self._accumulation = accumulation
        self._rules = rules
        self._num_processes = num_processes
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def parameters_changed(self) -> None:
        """Have the members of each optimizer looked up again."""
        self._accumulation.members.changed()

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
        gradient_state = self._accumulation.gradient_state
        window = gradient_state.current
        if self._rules.guards and window is not None:
            self._check_window(window, closure)
            if window.num_backwards and not self._is_covered(prepared, window):
                self._join(self._accumulation.members.of_optimizer(prepared.optimizer), window)
        if not gradient_state.sync_gradients or self._puts_off(window):
            return None, prepared.step_was_skipped
        if self._rules.guards:
            self._check_complete(prepared)
            if self._num_processes > 1:
                self._check_synced(prepared)
        clock = self._accumulation.clock
        if self.max_grad_norm is not None and closure is not None:
            closure = self._clipping(closure, prepared, self.max_grad_norm)
        elif self.max_grad_norm is not None:
            self._clip(parameters_of(prepared), self.max_grad_norm, 2.0, [prepared])
        if self._accumulation.scaler is None:
            self._accumulation.weighing.is_in_closure = closure is not None
            try:
                outcome, skipped = prepared.optimizer.step(closure), prepared.step_was_skipped
            finally:
                self._accumulation.weighing.is_in_closure = False
        else:
            outcome, skipped = self._scaled_step(prepared, closure)
        self._accumulation.note_step()
        if clock is not None:
            clock.mark("step")
        return outcome, skipped

    def _is_covered(self, prepared: AcceleratedOptimizer, window: Window) -> bool:
        """Return True if the window's `accumulate` was given all members of the optimizer."""
        members, key = self._accumulation.members, (id(prepared), id(window))
        known = members.looked_up.covered.get(key)
        if known is None:
            owned = members.of_optimizer(prepared.optimizer)
            known = members.looked_up.covered[key] = all(id(member) in window.key for member in owned)
        return known

    def _join(self, members: Sequence[Member], window: Window) -> None:
        """Let models that a block steps or clips belong to its window, if `accumulate` was given other models only.

        In `with accumulate(head)` both `encoder_optimizer.step()` and its `zero_grad()` then wait for the window's end,
        and the gradients get the window's correction.
        """
        if not members or window.holds(members):
            return
        others = [other for other in self._accumulation.gradient_state.windows.values() if other is not window]
        if any(other.num_backwards and other.holds(members) for other in others):
            return
        window.join(members)
        if self._accumulation.gradient_state.sync_gradients:
            # The window has ended, and has corrected the models that it knew.
            self._accumulation.weighing.correct_joined(window)

    def _puts_off(self, window: Window | None) -> bool:
        """Put the update off, and return True, if the window has not ended: its last micro-batch was left out."""
        gradient_state = self._accumulation.gradient_state
        if window is None or not gradient_state.lacks_end(window):
            return False
        window.put_off()
        gradient_state.sync_gradients = False  # Schedulers follow it.
        return True

    def _scaled_step(self, prepared: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        if closure is not None:
            raise ValueError(
                "step(closure) cannot be used with fp16: its gradients are scaled. Use bf16, or no closure."
            )
        scaler = self._accumulation.scaler
        assert scaler is not None
        happened: list[bool] = []
        handle = prepared.optimizer.register_step_post_hook(lambda *_: happened.append(True))
        try:
            outcome = scaler.step(prepared.optimizer)
        finally:
            handle.remove()
        skipped = _skips_inside(prepared.optimizer) and _overflowed(scaler, prepared.optimizer)
        self._unscaled.discard(id(prepared))
        self._stepped.add(id(prepared))
        # GradScaler.update() must run once, after all optimizers have stepped, because it forgets which were unscaled.
        if len(self._stepped) >= len(self.optimizers):
            self.update_scaler()
        return outcome, skipped or not happened

    def update_scaler(self) -> torch.amp.GradScaler | None:
        """Update the scale by the steps since its last update; return the scaler, if there is one.

        Gradients that other windows have gathered by then get the new scale, because more will be added to them.
        """
        scaler = self._accumulation.scaler
        if self._stepped and scaler is not None:
            opened = [window for window in self._accumulation.gradient_state.windows.values() if window.num_backwards]
            before = _scale_of(scaler).clone() if opened else torch.ones(())
            done = {
                id(parameter)
                for prepared in self.optimizers
                if id(prepared) in self._stepped or id(prepared) in self._unscaled
                for parameter in parameters_of(prepared)
            }
            self._stepped.clear()
            self._unscaled.clear()
            scaler.update()
            for window in opened:
                parameters = (parameter for member in window.all_members for parameter in member.parameters())
                gathered = [parameter for parameter in parameters if id(parameter) not in done]
                rescale(gathered, _scale_of(scaler) / before)
                if window.gathered is not None:
                    # The version of the gradient has changed.
                    window.note_gathered(window.members)
        return scaler

    def may_clear(self, prepared: AcceleratedOptimizer) -> bool:
        """Return True if `zero_grad()` clears; the gradients then count as not synchronised."""
        gradient_state = self._accumulation.gradient_state
        if self._rules.zero_grad_drops_window:
            return gradient_state.sync_gradients
        if gradient_state.loaded:
            return False
        owned, current = self._accumulation.members.of_optimizer(prepared.optimizer), gradient_state.current
        for window in gradient_state.windows.values():
            if not window.num_backwards:
                continue
            if window is current and gradient_state.sync_gradients and window.backwards_in_block:
                continue
            if window.holds(owned):
                return False
        for member in owned:
            member.clear_synced()
        return True

    def unscale_given(self, given: Any) -> None:
        """Undo the scaling of the gradients of one optimizer, of a list, or with None of all.

        Raises:
            ValueError: One was not prepared.
        """
        known = {id(given): prepared for prepared in self.optimizers for given in (prepared, prepared.optimizer)}
        chosen = self.optimizers if given is None else given
        listed = [chosen] if id(chosen) in known or not isinstance(chosen, Iterable) else list(chosen)
        for optimizer in listed:
            if id(optimizer) not in known:
                raise ValueError(
                    f"unscale_gradients({type(optimizer).__name__}): it was not prepared. Pass an optimizer that "
                    "prepare() returned, a list of them, or nothing for all."
                )
        self.unscale(known[id(optimizer)] for optimizer in listed)

    def unscale(self, optimizers: Iterable[AcceleratedOptimizer]) -> None:
        """Undo the scaling of fp16 gradients, once for each update."""
        scaler = self._accumulation.scaler
        if scaler is None:
            return
        for prepared in optimizers:
            has_gradients = any(parameter.grad is not None for parameter in parameters_of(prepared))
            if id(prepared) not in self._unscaled and has_gradients:
                scaler.unscale_(prepared.optimizer)
                self._unscaled.add(id(prepared))

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Clip the gradients where a window ends; inside a window there is nothing to clip yet."""
        check_limit("max_norm", max_norm)
        if not self._clips_now():
            return None
        return self._clip(self._all_corrected(parameters), max_norm, norm_type, self.optimizers)

    def clip_value(self, parameters: Any, clip_value: float) -> None:
        """Clip each element, where a window ends."""
        check_limit("clip_value", clip_value)
        if self._clips_now():
            parameters = self._all_corrected(parameters)
            self.unscale(self.optimizers)
            clip_value_(parameters, clip_value)

    def _clips_now(self) -> bool:
        """Return True where a window ends; by Accelerate's rules also inside a window."""
        gradient_state = self._accumulation.gradient_state
        is_wanted = gradient_state.sync_gradients or self._rules.clip_inside_window
        return is_wanted and not self._puts_off(gradient_state.current)

    def _all_corrected(self, parameters: Any) -> Any:
        """Return the parameters that are to be clipped, after their models have joined the window that has ended."""
        window = self._accumulation.gradient_state.current
        if window is None or not self._rules.guards or (type(window.correction) is float and window.correction == 1.0):
            return parameters
        listed = list(given_parameters(parameters))
        clipped = set(map(id, listed))
        for member in self._accumulation.members.models_and_leaves:
            if not window.holds([member]) and any(id(parameter) in clipped for parameter in member.parameters()):
                self._join([member], window)
        return listed

    def _clip(
        self, parameters: Any, max_norm: float, norm_type: float, optimizers: Iterable[AcceleratedOptimizer]
    ) -> torch.Tensor:
        self.unscale(optimizers)
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

    def _check_complete(self, prepared: AcceleratedOptimizer) -> None:
        """Raise RuntimeError if another window than the current one gathers gradients that this step would use."""
        gradient_state = self._accumulation.gradient_state
        if len(gradient_state.windows) < 2:
            return
        owned = self._accumulation.members.of_optimizer(prepared.optimizer)
        for key, window in gradient_state.windows.items():
            if window is not gradient_state.current and window.num_backwards and key and window.holds(owned):
                raise RuntimeError(
                    f"step(): this {type(prepared.optimizer).__name__} also updates models whose window is still open, "
                    f"with {window.num_batches} of {window.num_steps} micro-batches. Pass all models of an optimizer "
                    "to the same accumulate(), as in accumulate(encoder, decoder), or give each model an optimizer."
                )

    def _check_window(self, window: Window, closure: Callable[[], Any] | None) -> None:
        """Raise ValueError for a closure in a window of several micro-batches; warn of a backward of torch's own."""
        gradient_state = self._accumulation.gradient_state
        if closure is not None and (window.num_batches > 1 or not gradient_state.sync_gradients):
            raise ValueError(
                f"step(closure) in a window of {window.num_steps} micro-batches: the closure computes one of them, and "
                "the step needs the gradient of all. Call backward(loss) before step(), without a closure; LBFGS "
                "and others that call their closure again need gradient_accumulation_steps=1."
            )
        lacks_backward = closure is None and window.num_steps > 1 and window.backwards_in_block == 0
        if lacks_backward and window.has_unnoted_gradients(gradient_state.block.members):
            self._accumulation.warn_once(
                "backward of torch",
                "a micro-batch of accumulate() has gradients and called no accelerator.backward(loss): "
                "loss.backward() alone adds the micro-batches up instead of taking their mean. Write "
                "accelerator.backward(loss).",
            )

    def _check_synced(self, prepared: AcceleratedOptimizer) -> None:
        members = self._accumulation.members
        for member in members.of_optimizer(prepared.optimizer):
            if member.notes is not None and member.notes.trains_alone:
                return
            if not member.is_synced and member.has_gradients():
                raise RuntimeError(
                    f"step(): the gradients of {member.describe()} were not synchronised, so the ranks' weights "
                    f"would diverge. {member.explain_unsynced()}"
                )
            self._check_foreign(member)
        local = [parameter for parameter in members.local_parameters(prepared.optimizer) if parameter.grad is not None]
        if local:
            raise RuntimeError(_local(prepared.optimizer, local, members))

    def _check_foreign(self, member: Member) -> None:
        """Have the ranks compare gradients that no backward of the Accelerator has computed, now and then."""
        check, notes = self._accumulation.check, member.notes
        if check is None or notes is None or notes.answered or not member.has_gradients():
            return
        notes.num_foreign += 1
        check.compare_gradients(member, notes.num_foreign)

    def clear(self) -> None:
        """Release the optimizers."""
        self.optimizers.clear()
        self._unscaled.clear()
        self._stepped.clear()


def _scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return the scale where it is; `get_scale()` would wait for a GPU."""
    scale = scaler._scale  # noqa: SLF001
    assert scale is not None
    return scale


def _skips_inside(optimizer: torch.optim.Optimizer) -> bool:
    """Return True for an optimizer that `GradScaler` always calls, and that skips by itself (`fused=True`)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _overflowed(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]  # noqa: SLF001 - no public name
    return any(float(flag) for flag in found.values())


def _local(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], members: Members) -> str:
    """Return the message that nothing synchronises these parameters, and why."""
    mine = {id(parameter) for parameter in parameters}
    inside = [model for model in members.models if any(id(parameter) in mine for parameter in model.parameters())]
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in parameters[:3])
    if inside:
        name = type(getattr(inside[0], "module", inside[0])).__name__
        why = (
            f"were frozen, or not yet part of the {name}, when prepare() wrapped it. Unfreeze or add them first and "
            "call prepare() then; for stages that train other layers, give DistributedDataParallelKwargs("
            "find_unused_parameters=True) and freeze after prepare()."
        )
    else:
        why = (
            "belong to no model that prepare() was given. Write `model, optimizer = accelerator.prepare(model, "
            "optimizer)`, with each model and leaf tensor that the optimizer updates."
        )
    return (
        f"step(): nothing synchronised the gradients of {len(parameters)} parameters of this "
        f"{type(optimizer).__name__} (shapes {shapes}{', ...' if len(parameters) > 3 else ''}), so the ranks' weights "
        f"would diverge: they {why}"
    )
