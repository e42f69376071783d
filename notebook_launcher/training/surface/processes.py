"""Which process this is, and how processes take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training import operations

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from notebook_launcher.training.plugins import DistributedType
    from notebook_launcher.training.process.accelerator_state import AcceleratorState

__all__ = ["ProcessMethods"]


class ProcessMethods:
    """Everything that `ProcessState` knows and does."""

    state: AcceleratorState
    flag_tensor: torch.Tensor | None = None
    """This rank's flag, where `set_trigger` has raised it; see `check_trigger`."""

    @property
    def distributed_type(self) -> DistributedType:
        """How processes work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """How many processes train together."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self.state.local_process_index

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.state.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.num_processes > 1

    @property
    def multi_device(self) -> bool:
        """Whether several processes have an accelerator each."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def data_parallel_rank(self) -> int:
        """The same as `process_index`: all parallelism here is data parallelism."""
        return self.process_index

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function do nothing on every rank but the first."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Make a function do nothing on every rank but the first of each machine."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Make a function do nothing on every rank but the last."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Make a function do nothing on every rank but one."""
        return self.state.on_process(function, process_index=process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Make a function do nothing on every rank but one of each machine."""
        return self.state.on_local_process(function, local_process_index=local_process_index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let rank 0 go through the block before the others."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let each machine's first rank go through the block before the others."""
        return self.state.local_main_process_first()

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here."""
        self.state.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on each machine's first rank."""
        self.state.print(*args, **kwargs)

    def split_between_processes(
        self,
        inputs: Any,
        apply_padding: bool = False,  # noqa: FBT001, FBT002 - Accelerate's signature
    ) -> AbstractContextManager[Any]:
        """Give each rank its part of a list, tuple, dictionary or tensor, as `with ... as part:`."""
        return self.state.split_between_processes(inputs, apply_padding=apply_padding)

    def set_trigger(self) -> None:
        """Raise this rank's flag; see `check_trigger`."""
        self.flag_tensor = torch.ones(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return whether any rank has raised its flag, and lower all; every rank must call it."""
        flag = torch.zeros(1, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = None
        return bool(operations.reduce(flag, reduction="sum").item() > 0)
