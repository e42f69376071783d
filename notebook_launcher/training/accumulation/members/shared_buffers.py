"""Buffers of a sharded model, such as a batch norm's statistics: copied from rank 0 to every rank.

DistributedDataParallel broadcasts buffers before each forward; `fully_shard` leaves each rank its own buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher.training.accumulation.members.member_kinds import PlainModel

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """The buffers in a model's state dict. Buffers outside of it are computed, and equal on all ranks."""

    def __init__(self, member: PlainModel) -> None:
        self.member = member
        """The model that has the buffers."""
        self._modules = [module for module in member.module.modules() if any(True for _ in _persistent(module))]

    def broadcast(self) -> None:
        """Replace the values by the values of rank 0, with one broadcast for each dtype."""
        found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for module in self._modules:
            for buffer in _persistent(module):
                found.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for buffers in found.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            dist.broadcast(flat, src=0)
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            with torch.no_grad():
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))


def _persistent(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for name, buffer in module._buffers.items():  # noqa: SLF001 - to leave out what the state dict leaves out
        if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield buffer
