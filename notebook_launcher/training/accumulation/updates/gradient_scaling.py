"""Steps with the scaled gradients of fp16: they are unscaled once for each update, and the scale follows the steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training.accumulation.members.targets import parameters_of
from notebook_launcher.training.accumulation.windows.correction import rescale

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.training.accumulation.updates.live_optimizers import LiveOptimizers
    from notebook_launcher.training.accumulation.updates.optimizer import AcceleratedOptimizer
    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState

__all__ = ["GradientScaling"]


class GradientScaling:
    """Steps and unscales the prepared optimizers of an Accelerator with its `GradScaler`; without one, does nothing."""

    def __init__(
        self, scaler: torch.amp.GradScaler | None, gradient_state: GradientState, optimizers: LiveOptimizers
    ) -> None:
        self._scaler = scaler
        self._gradient_state = gradient_state
        self._optimizers = optimizers
        self._unscaled: set[int] = set()
        """Ids of the optimizers whose gradients were unscaled since their last step."""
        self._stepped: set[int] = set()
        """Ids of the optimizers that have stepped since the scale was updated last."""

    def step(self, prepared: AcceleratedOptimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Step with scaled gradients; return the result of the optimizer, and True if the step was skipped."""
        if closure is not None:
            raise ValueError(
                "step(closure) cannot be used with fp16: its gradients are scaled. Use bf16, or no closure."
            )
        scaler = self._scaler
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
        if len(self._stepped) >= len(self._optimizers):
            self.update()
        return outcome, skipped or not happened

    def update(self) -> torch.amp.GradScaler | None:
        """Update the scale by the steps since its last update; return the scaler, None in other precisions.

        Gradients that other windows have gathered by then get the new scale, because more will be added to them.
        """
        scaler = self._scaler
        if self._stepped and scaler is not None:
            opened = [window for window in self._gradient_state.windows.values() if window.num_backwards]
            before = _scale_of(scaler).clone() if opened else torch.ones(())
            done = {
                id(parameter)
                for prepared in self._optimizers
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

    def unscale_given(self, given: Any) -> None:
        """Undo the scaling of the gradients of one optimizer, of a list, or with None of all.

        Raises:
            ValueError: An optimizer was not prepared.
        """
        known = {id(ours): prepared for prepared in self._optimizers for ours in (prepared, prepared.optimizer)}
        chosen = self._optimizers if given is None else given
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
        scaler = self._scaler
        if scaler is None:
            return
        for prepared in optimizers:
            has_gradients = any(parameter.grad is not None for parameter in parameters_of(prepared))
            if id(prepared) not in self._unscaled and has_gradients:
                scaler.unscale_(prepared.optimizer)
                self._unscaled.add(id(prepared))

    def clear(self) -> None:
        """Forget which optimizers were unscaled and have stepped."""
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
