"""Accelerate's shared states: every instance shows the same, and the newest Accelerator decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from notebook_launcher.compat.names import find as __getattr__  # noqa: F401 - the rest of Accelerate's module
from notebook_launcher.training.accumulation.windows import GradientState as _GradientState
from notebook_launcher.training.plugins import ACCELERATE, GradientAccumulationPlugin
from notebook_launcher.training.process.process_state import AcceleratorState as _AcceleratorState
from notebook_launcher.training.process.process_state import ProcessState
from notebook_launcher.training.resolving import resolve_precision

if TYPE_CHECKING:
    import datetime as dt

    from notebook_launcher.training.requests import Safepoint


__all__ = ["AcceleratorState", "GradientState", "PartialState"]

# What the state of the process knows by itself: neither its precision, nor what an Accelerator noted for it.
_OF_THE_PROCESS = frozenset({"num_processes", "process_index", "local_process_index", "device", "backend", "_patience"})


class PartialState(ProcessState):
    """The process state, the same for all instances of the process.

    The first instance joins the process group; `kwargs` are `backend` and `timeout`.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            super().__init__(cpu=cpu, backend=kwargs.get("backend"), timeout=kwargs.get("timeout"))

    @staticmethod
    def _reset_state() -> None:
        """Forget the shared state; the process group stays."""
        PartialState._shared_state.clear()


class AcceleratorState(_AcceleratorState):
    """The process state with the precision, the same for all instances of the process.

    The first instance joins the process group.

    Raises:
        ValueError: The shared state has another precision.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        *,
        backend: str | None = None,
        timeout: dt.timedelta | None = None,
        **_: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            PartialState(cpu, backend=backend, timeout=timeout)
            precision = resolve_precision(mixed_precision, [])
            super().__init__(cpu=cpu, backend=backend, timeout=timeout, mixed_precision=precision)
        elif mixed_precision is not None and mixed_precision != self._mixed_precision:
            raise ValueError(
                f"mixed_precision={mixed_precision!r}: an Accelerator of this process has {self._mixed_precision!r}, "
                "and as in Accelerate all share it. Call AcceleratorState._reset_state() first, or import "
                "Accelerator from notebook_launcher, where each has its own."
            )

    def __getattr__(self, name: str) -> Any:
        if not self._shared_state:
            # As in Accelerate, an Accelerator whose state was reset still prints, waits and names its process.
            if name in _OF_THE_PROCESS:
                return getattr(PartialState(), name)
            raise AttributeError(_was_reset(name))
        return super().__getattribute__(name)

    @property
    def initialized(self) -> bool:
        """True once an Accelerator, or an instance, was made."""
        return bool(self._shared_state)

    def check_not_reset(self) -> None:
        """Raise AttributeError if the shared state was reset."""
        if not self._shared_state:
            raise AttributeError(_was_reset("distributed_type"))

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the shared state; the process group stays."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()  # noqa: SLF001 - Accelerate's name


class GradientState(_GradientState):
    """The state of accumulation, the same for all instances of the process.

    A new plugin or new `requests` replace the earlier ones.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        requests: Safepoint | None = None,
    ) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            super().__init__(gradient_accumulation_plugin or GradientAccumulationPlugin(), ACCELERATE, requests)
            return
        if gradient_accumulation_plugin is not None:
            self.use_plugin(gradient_accumulation_plugin)
        if requests is not None:
            self.active_loaders.requests = requests

    @property
    def initialized(self) -> bool:
        """True once an Accelerator, or an instance, was made."""
        return bool(self._shared_state)

    @staticmethod
    def _reset_state() -> None:
        """Forget the shared state."""
        GradientState._shared_state.clear()


def _was_reset(name: str) -> str:
    return (
        f"`AcceleratorState` object has no attribute `{name}`. "
        "This happens if `AcceleratorState._reset_state()` was called while an Accelerator was still in use. "
        "Make a new Accelerator, and prepare with that."
    )
