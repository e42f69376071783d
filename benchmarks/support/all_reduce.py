"""The all-reduce that the cluster benchmark times: in our ranks and Ray Train's, and as the script of a torchrun.

It imports nothing of this folder, so that each of these can run it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

__all__ = ["reduce_gradients"]

NUM_ELEMENTS = 4 << 20
NUM_TIMED = 10


def reduce_gradients() -> float:
    """Return the seconds of an all-reduce of 16 MB in the process group that is there."""
    data = torch.ones(NUM_ELEMENTS)
    dist.all_reduce(data)
    began = time.perf_counter()
    for _ in range(NUM_TIMED):
        dist.all_reduce(data)
    return (time.perf_counter() - began) / NUM_TIMED


if __name__ == "__main__":
    dist.init_process_group("gloo")
    seconds = reduce_gradients()
    if dist.get_rank() == 0:
        print("seconds", seconds)
    dist.destroy_process_group()
