"""Waits for the work that a call has queued on its GPU before the call counts as returned; finds a lost CUDA context.

A kernel that fails (a device-side assert, an illegal address) leaves its error to the next CUDA call, wherever that is,
and every later CUDA call of the process fails too.
"""

from __future__ import annotations

import sys
import time

__all__ = ["finish", "is_broken"]

SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 2e-3
"""Least and greatest number of seconds between two looks; in between, an eighth of the wait so far."""


def _uses_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def finish() -> None:
    """Wait until the current stream is done, so that an error of the function's last kernels is the function's.

    The stream is asked again and again, because CUDA's own wait cannot be interrupted.

    Raises:
        RuntimeError: A kernel failed; `torch.AcceleratorError` in newer versions of torch.
    """
    if not _uses_gpu():
        return
    import torch

    stream, began = torch.cuda.current_stream(), time.monotonic()
    while not stream.query():
        time.sleep(min(max((time.monotonic() - began) / 8, SHORTEST_PAUSE), LONGEST_PAUSE))


def is_broken() -> bool:
    """Return True if no CUDA call of this process can succeed any more."""
    if not _uses_gpu():
        return False
    import torch

    try:
        torch.cuda.current_stream().query()  # Unlike a synchronisation it does not wait for a peer that has failed.
    except RuntimeError:
        return True
    return False
