"""Training in a rank, or in one process without a launcher: the Accelerator and what belongs to it."""

from __future__ import annotations

import importlib
from typing import Any

HOMES = {
    "accelerator": ("Accelerator",),
    "accumulation.local_sgd": ("LocalSGD",),
    "accumulation.models": ("extract_model_from_parallel",),
    "accumulation.optimizer": ("AcceleratedOptimizer",),
    "accumulation.scheduler": ("AcceleratedScheduler",),
    "accumulation.verify": ("AccumulationReport",),
    "accumulation.windows": ("GradientState",),
    "checkpoints": ("CheckpointError", "load", "load_model", "save", "save_model"),
    "data": (
        "BatchSamplerShard",
        "DataLoaderDispatcher",
        "DataLoaderShard",
        "DataLoaderStateMixin",
        "IterableDatasetShard",
        "SeedableRandomSampler",
        "SkipBatchSampler",
        "SkipDataLoader",
        "prepare_data_loader",
        "skip_first_batches",
    ),
    "device_memory": ("clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"),
    "operations": (
        "DistributedOperationException",
        "TensorInformation",
        "broadcast",
        "broadcast_object_list",
        "concatenate",
        "convert_to_fp32",
        "copy_tensor_to_devices",
        "find_batch_size",
        "find_device",
        "gather",
        "gather_object",
        "get_data_structure",
        "honor_type",
        "initialize_tensors",
        "listify",
        "pad_across_processes",
        "pad_input_tensors",
        "recursively_apply",
        "reduce",
        "send_to_device",
        "slice_tensors",
    ),
    "plugins": (
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "DistributedType",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
        "KwargsHandler",
        "LoggerType",
        "PrecisionType",
        "ProfileKwargs",
        "ProjectConfiguration",
        "RNGType",
    ),
    "process.accelerator_state": ("AcceleratorState",),
    "process.environment": ("clear_environment", "patch_environment"),
    "process.process_state": ("ProcessState", "wait_for_everyone"),
    "random": ("set_seed", "synchronize_rng_state", "synchronize_rng_states"),
    "recording.logging": ("get_logger",),
    "recording.progress_bars": ("tqdm",),
    "recording.trackers": ("GeneralTracker", "JSONLinesTracker", "TensorBoardTracker", "register_tracker_class"),
}

__all__ = sorted(name for names in HOMES.values() for name in names)  # noqa: PLE0605 - named once, above


def __getattr__(name: str) -> Any:
    for module, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
