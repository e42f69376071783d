"""Arguments of an Accelerator as they were given, in the groups that `resolving.py` resolves."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_launcher.training.parallelism.sizes import ParallelismConfig
    from notebook_launcher.training.plugins import (
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
    )

__all__ = ["AcceleratorArguments", "PreparationArguments"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorArguments:
    """Arguments of an Accelerator that DeepSpeed's settings give as well."""

    mixed_precision: str | None
    accumulation: GradientAccumulationPlugin
    max_grad_norm: float | None
    fsdp_plugin: FullyShardedDataParallelPlugin | None
    parallelism_config: ParallelismConfig | None
    scaler: GradScalerKwargs | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreparationArguments:
    """Arguments of an Accelerator that say how `prepare` treats each kind of object."""

    device_placement: bool
    """True if models and batches are moved to the device."""
    ddp_handler: DistributedDataParallelKwargs | None
    """Arguments of DistributedDataParallel."""
    dataloader_config: DataLoaderConfiguration | None
    """Settings of loaders."""
    loader_shortcuts: Mapping[str, Any]
    """Settings of loaders that were given one by one; None: not given."""
    rng_types: Iterable[Any] | None
    """Generators that are made equal on all ranks at the start of each epoch."""
    step_scheduler_with_optimizer: bool
    """False: each `step()` of a scheduler advances it."""
    dynamo_backend: str | None
    """The backend of `torch.compile`; None: by `ACCELERATE_DYNAMO_BACKEND`."""
