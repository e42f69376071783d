"""An optimizer that steps once, where a window ends, and knows if it stepped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.training.accumulation.updates.updates import Updates

__all__ = ["AcceleratedOptimizer"]


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A prepared optimizer: inside a window `step()` and `zero_grad()` do nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer, updates: Updates | None = None) -> None:
        # Not super().__init__(): the wrapped optimizer has the parameters and the state.
        self.optimizer = optimizer
        self._updates = updates
        self._is_overflow = False  # Accelerate's name: loops set it, to hold a scheduler back

    @property
    def state(self) -> Any:
        """Attribute of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Attribute of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups
        self._note_other_parameters()

    @property
    def defaults(self) -> dict[str, Any]:
        """Attribute of the wrapped optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients had overflowed."""
        return self._is_overflow

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, if the window ends with this micro-batch.

        Raises:
            RuntimeError: Gradients of a model were not synchronised; the message has the reason.
        """
        if self._updates is None:
            return self.optimizer.step(closure)
        outcome, self._is_overflow = self._updates.step(self, closure)
        return outcome

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless a window has gathered some that no step has used."""
        if self._updates is None or self._updates.may_clear(self):
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        if self._updates is not None and "params" in param_group:
            param_group = {**param_group, "params": self._updates.present(param_group["params"], trains=True)}
        self.optimizer.add_param_group(param_group)
        self._note_other_parameters()

    def _note_other_parameters(self) -> None:
        """Have the members of this optimizer looked up again."""
        if self._updates is not None:
            self._updates.parameters_changed()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Call the wrapped optimizer's `train`, which schedule-free optimizers have."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Call the wrapped optimizer's `eval`."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # missing while this object is being unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "_is_overflow": self._is_overflow}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _updates=None)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
