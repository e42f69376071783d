"""A rank's random seeds, threads and GPU."""

from __future__ import annotations

import random
import sys

__all__ = ["choose_gpu", "seed", "set_threads"]


def seed(number: int) -> None:
    """Seed Python, NumPy's legacy generator and torch (all devices)."""
    number %= 2**32
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(number)


def set_threads(num_threads: int) -> None:
    """Set torch's intra-op threads; libraries loaded later read the environment."""
    import torch

    torch.set_num_threads(num_threads)


def choose_gpu(rank: int) -> None:
    """Make this rank's GPU the current one."""
    import torch

    torch.cuda.set_device(rank % torch.cuda.device_count())
