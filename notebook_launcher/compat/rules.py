"""What decides by Accelerate's rules: its Accelerator, loaders, logger and `reduce`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from notebook_launcher import training
from notebook_launcher.compat.state import AcceleratorState, GradientState
from notebook_launcher.training import operations
from notebook_launcher.training.accelerator import Accelerator as _Accelerator
from notebook_launcher.training.data import prepare
from notebook_launcher.training.plugins import ACCELERATE, Rules
from notebook_launcher.training.recording.logging import MultiProcessAdapter as _MultiProcessAdapter

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from notebook_launcher.training.plugins import GradientAccumulationPlugin
    from notebook_launcher.training.requests import Safepoint
    from notebook_launcher.training.resolving import Settings


class Accelerator(_Accelerator):
    """`notebook_launcher.Accelerator` with Accelerate 1.15's numbers; `training/plugins.py` lists the differences."""

    _rules: ClassVar[Rules] = ACCELERATE
    state: AcceleratorState

    def _resolve_precision(self, argument: str | None, conflicts: list[str]) -> str:
        if argument is None and AcceleratorState._shared_state:  # noqa: SLF001 - ours
            return AcceleratorState().mixed_precision
        return super()._resolve_precision(argument, conflicts)

    def _make_accelerator_state(self, settings: Settings, *, cpu: bool) -> AcceleratorState:
        group = settings.group
        return AcceleratorState(settings.mixed_precision, cpu, backend=group.backend, timeout=group.timeout)

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


def prepare_data_loader(dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
    """Return a loader that yields this rank's share, as `prepare_data_loader` of `training` does.

    As in Accelerate, the one state of accumulation of the process sees the loader, so that windows end with it.
    """
    stack = GradientState().active_loaders
    accelerates = {"uneven": "leave", "check_ranks": False, "keeps_shares": True, "stack": stack}
    return prepare.prepare_data_loader(dataloader, *args, **{**accelerates, **kwargs})


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:  # noqa: ARG001
    """Combine each tensor over all processes.

    Args:
        tensor: Nested tensors, of the same shapes and dtypes on all processes. They are not changed.
        reduction: `"mean"`, `"max"`, or anything else for the sum, `"none"` included, as in Accelerate.
        scale: Without effect: in Accelerate, it counts on XLA alone.

    Returns:
        The same structure with new tensors on every process.
    """
    return operations.reduce(tensor, reduction if reduction in ("mean", "max") else "sum")


class MultiProcessAdapter(_MultiProcessAdapter):
    """A logger that knows which process it speaks in; a `stacklevel` that it is given counts its own frame."""

    calling_line = 2


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return a logger for several processes; see `notebook_launcher.training.get_logger`."""
    adapter: _MultiProcessAdapter = training.get_logger(name, log_level)
    return MultiProcessAdapter(adapter.logger)
