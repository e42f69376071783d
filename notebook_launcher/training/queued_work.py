"""Marks behind the work that a program has queued on its GPU, which the program runs ahead of.

With NCCL a collective has returned once it is queued. It has met the peers' only when the GPU has passed it: then every
peer has begun it, too.
"""

from __future__ import annotations

import torch


def mark_queued_work(*, timed: bool = False) -> torch.cuda.Event | None:
    """Mark the end of all work queued by now on the current GPU.

    Args:
        timed: True for a mark that has a time, which nothing is to wait for.

    Returns:
        The mark; None before this process uses its GPU, and inside a captured CUDA graph.
    """
    if not torch.cuda.is_initialized():
        return None
    return record_work(torch.cuda.current_device(), timed=timed)


def record_work(device: torch.device | int, *, timed: bool = False) -> torch.cuda.Event | None:
    """Mark the end of all work queued by now on a GPU, as `mark_queued_work` does."""
    if torch.cuda.is_current_stream_capturing():  # Neither marks nor waits may be captured in a CUDA graph.
        return None
    # `blocking`: a wait that spins would take a core from the data loader's workers.
    event = torch.cuda.Event(enable_timing=timed, blocking=not timed)
    # Named, because `record()` alone looks the stream up by a way that takes 20 us.
    event.record(torch.cuda.current_stream(device))
    return event
