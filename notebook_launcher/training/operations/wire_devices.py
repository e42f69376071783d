"""The device on which the default group takes a tensor that it sends or reduces.

The two rules differ for a tensor on a GPU if the group has gloo for GPUs and no NCCL. gloo's collectives take tensors
on GPUs, and then `collective_device` leaves them there. gloo's sends from one rank to another take only what lies in
the CPU's memory, so `sending_device` names the CPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["collective_device", "is_served", "sending_device"]


def sending_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU or GPU that the group can send from."""
    kinds = _kinds_of_devices()
    if "cuda" in kinds and ("cpu" not in kinds or device.type == "cuda") and "nccl" in dist.get_backend_config():
        return device if device.type == "cuda" else _own_gpu()
    return torch.device("cpu")


def collective_device(device: torch.device) -> torch.device:
    """Return `device`, or the CPU or GPU from which the group's collectives take tensors."""
    kinds = _kinds_of_devices()
    if device.type in kinds:
        return device
    return _own_gpu() if "cuda" in kinds else torch.device("cpu")


def is_served(device: torch.device) -> bool:
    """Return True if the group's collectives take tensors on this device as they are."""
    return device.type in _kinds_of_devices()


def _kinds_of_devices() -> set[str]:
    # "cpu:gloo,cuda:gloo", or "cuda:nccl" for a group that cannot take what lies in the CPU's memory.
    return {entry.partition(":")[0] for entry in dist.get_backend_config().split(",")}


def _own_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
