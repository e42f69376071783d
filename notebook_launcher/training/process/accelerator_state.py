"""The process state of an Accelerator, with the precision it settled on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.training.plugins import DistributedType
from notebook_launcher.training.process.process_state import ProcessState

if TYPE_CHECKING:
    import datetime as dt

    from notebook_launcher.training.parallelism.deepspeed import DeepSpeedPlugin
    from notebook_launcher.training.parallelism.mesh import Layout

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
        self.is_fsdp2 = False

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"` or `"bf16"`."""
        return self._mixed_precision

    def note_layout(self, layout: Layout) -> None:
        """Note that prepared models are sharded, for code that asks the state."""
        self.distributed_type, self.is_fsdp2 = DistributedType.FSDP, True
        self.fsdp_plugin = layout.plugin
        self.parallelism_config = layout.sizes

    def note_deepspeed(self, plugin: DeepSpeedPlugin | None) -> None:
        """Note DeepSpeed's settings, for code that asks the state."""
        self.deepspeed_plugin = plugin

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self._mixed_precision}\n"

    def __getattr__(self, name: str) -> Any:
        if name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"):
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
