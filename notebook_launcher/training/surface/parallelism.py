"""What code asks about other ways to parallelise: all parallelism here is data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["ParallelismMethods"]


class ParallelismMethods:
    """The questions, and a no to each, so that code that asks them runs."""

    deepspeed_plugin = None
    parallelism_config = None
    torch_device_mesh = None
    is_composable_parallelism_enabled = False
    fp8_enabled = False
    is_fsdp2 = False
    """Whether a plugin shards models; one that `fully_shard` was applied to beforehand is none of its business."""

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a part of the model lies on several devices by a `device_map`, and so cannot be trained."""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())
