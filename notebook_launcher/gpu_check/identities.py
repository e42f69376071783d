"""Identities of GPUs: their UUIDs, as NVML and torch tell them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bare", "gpu_difference", "uuid_in_torch"]


def bare(uuid: str) -> str:
    """Return a UUID as torch writes it; empty for a slice of a GPU, which torch may know by another name."""
    return "" if uuid.startswith("MIG-") else uuid.removeprefix("GPU-")


def uuid_in_torch(device: int) -> str:
    """Return the UUID of a GPU of this process; empty: unknown."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def gpu_difference(ours: Sequence[str], torchs: Sequence[str], *, by_number: bool = False) -> str:
    """Return in which way the GPUs that the launcher sees differ from torch's; empty if they are the same.

    Args:
        ours: UUIDs, bare; empty: unknown.
        torchs: The same. The order does not count: CUDA may number the GPUs otherwise than NVML does.
        by_number: True if the GPUs were chosen by such a number, which then may mean another GPU to each.
    """
    if len(ours) != len(torchs):
        return f"the launcher sees {len(ours)} GPUs, torch {len(torchs)}"
    if not by_number and all([*ours, *torchs]) and sorted(ours) != sorted(torchs):
        return "launcher and torch see different GPUs"
    return ""
