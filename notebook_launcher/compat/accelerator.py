"""The Accelerator by Accelerate's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from notebook_launcher.compat.names import find as __getattr__  # noqa: F401 - the rest of Accelerate's module
from notebook_launcher.compat.reducing import reduce
from notebook_launcher.compat.state import AcceleratorState, GradientState
from notebook_launcher.training.accelerator import Accelerator as _Accelerator
from notebook_launcher.training.plugins import ACCELERATE, Rules

if TYPE_CHECKING:
    from notebook_launcher.training.plugins import GradientAccumulationPlugin
    from notebook_launcher.training.requests import Safepoint

__all__ = ["Accelerator"]


class Accelerator(_Accelerator):
    """`notebook_launcher.Accelerator` with Accelerate 1.15's numbers; `training/plugins.py` lists the differences."""

    _rules: ClassVar[Rules] = ACCELERATE

    def _resolve_precision(self, argument: str | None, conflicts: list[str]) -> str:
        if argument is None and AcceleratorState._shared_state:  # noqa: SLF001 - ours
            return AcceleratorState().mixed_precision
        return super()._resolve_precision(argument, conflicts)

    def _make_accelerator_state(self, precision: str, *, cpu: bool) -> AcceleratorState:
        handler = self.init_handler
        return AcceleratorState(precision, cpu, backend=handler.backend, timeout=handler.timeout)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects for training on all ranks.

        Raises:
            AttributeError: The shared state was reset after this Accelerator was made.
        """
        self.state.check_not_reset()
        return super().prepare(*args, device_placement=device_placement)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum over ranks on every rank, the `"mean"` or the `"max"`; `scale` has no effect."""
        return reduce(tensor, reduction, scale)

    def _make_gradient_state(self, plugin: GradientAccumulationPlugin, requests: Safepoint | None) -> GradientState:
        state = GradientState(plugin, requests=requests)
        state.forget_windows()  # each Accelerator counts by itself
        return state
