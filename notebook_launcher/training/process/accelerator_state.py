"""The process state of an Accelerator, with the precision it settled on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.process.process_state import ProcessState

if TYPE_CHECKING:
    import datetime as dt

__all__ = ["AcceleratorState"]


class AcceleratorState(ProcessState):
    """A `ProcessState` that also knows the precision."""

    def __init__(
        self,
        *,
        cpu: bool = False,
        backend: str | None = None,
        timeout: dt.timedelta | None = None,
        mixed_precision: str = "no",
    ) -> None:
        super().__init__(cpu=cpu, backend=backend, timeout=timeout)
        self._mixed_precision = mixed_precision

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"` or `"bf16"`."""
        return self._mixed_precision

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self._mixed_precision}\n"

    def __getattr__(self, name: str) -> Any:
        if name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"):
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
