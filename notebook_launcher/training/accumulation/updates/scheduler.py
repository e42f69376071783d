"""A learning-rate scheduler that advances once for each update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.user_warnings import Warner

if TYPE_CHECKING:
    from notebook_launcher.training.accumulation.updates.optimizer import AcceleratedOptimizer
    from notebook_launcher.training.accumulation.windows.gradient_state import GradientState

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler:
    """A prepared scheduler: `step()` advances it if an update was made, and only then.

    Args:
        scheduler: A torch scheduler, or anything with `step()`.
        optimizers: The optimizers whose updates it follows: its own, or all.
        step_with_optimizer: False: every `step()` advances it.
        steps_per_update: 1; Accelerate's number of processes in `compat`.
        gradient_state: Knows if a micro-batch is the last of its window.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[AcceleratedOptimizer],
        *,
        step_with_optimizer: bool = True,
        steps_per_update: int = 1,
        gradient_state: GradientState | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.step_with_optimizer = step_with_optimizer
        self.steps_per_update = steps_per_update
        self.gradient_state = gradient_state
        self._warn_once = Warner()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the window has ended and its update was not skipped for an overflow."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if self.gradient_state is not None and not self.gradient_state.sync_gradients:
            if self.gradient_state.has_left_window:
                self._warn_once(
                    "left window",
                    "scheduler.step() did not advance: the loop was left inside a window of micro-batches, and a "
                    "prepared scheduler takes a step for each update. Leave the loop where accelerator.sync_gradients "
                    "is True; or, for a step at the end of each epoch whatever was left, give "
                    "Accelerator(step_scheduler_with_optimizer=False).",
                )
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.steps_per_update):
            # Short windows make more updates than planned, and OneCycleLR refuses to go past its end.
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step, one for each parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # Another process has no window to wait for.
        return {**self.__dict__, "gradient_state": None}

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
