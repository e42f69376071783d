"""Waits for the work that a call has queued on GPUs before the call counts as returned; finds a lost CUDA context.

A kernel that fails (a device-side assert, an illegal address) leaves its error to the next CUDA call, wherever that is,
and every later CUDA call of the process fails too.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["finish", "is_broken", "run_apart"]

LOOK_EVERY = 1e-3
"""Seconds between two looks at a stream."""
LAST_KERNELS = 0.1
"""Longest wait in seconds for queued work, after the function has failed: the work may wait in NCCL for a peer that
never comes, and the rank must report its failure."""


def finish() -> None:
    """Wait until all streams of all GPUs that this process uses are done: their errors are the function's.

    Raises:
        RuntimeError: A kernel failed; `torch.AcceleratorError` in newer versions of torch.
    """
    if not (devices := _devices_in_use()):
        return
    import torch

    ends = [torch.cuda.Event(blocking=True) for _ in devices]  # type: ignore[no-untyped-call]
    for device, end in zip(devices, ends, strict=True):
        end.record(torch.cuda.current_stream(device))

    def wait() -> None:
        for device, end in zip(devices, ends, strict=True):
            end.synchronize()  # It has nearly all the work, and this wait, unlike the next, leaves the core to others.
            torch.cuda.synchronize(device)  # All streams of the device: nobody can list them.

    run_apart(wait)


def run_apart(wait: Callable[[], object]) -> None:
    """Run a function in a thread, and return or raise as it does. An interrupt ends this wait, not the function."""
    is_over = threading.Lock()
    is_over.acquire()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:  # raised in the thread that waits
            errors.append(error)
        finally:
            is_over.release()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    is_over.acquire()  # Below no frame of Python's own: a stack then shows that the function has ended.
    thread.join()
    if errors:
        raise errors.pop()


def is_broken() -> bool:
    """Return True if no CUDA call of this process can succeed any more; called after a failure."""
    if not (devices := _devices_in_use()):
        return False
    import torch

    until = time.monotonic() + LAST_KERNELS
    try:
        for device in devices:
            while not torch.cuda.current_stream(device).query() and time.monotonic() < until:
                time.sleep(LOOK_EVERY)
    except RuntimeError:
        return True
    return False


def _devices_in_use() -> list[int]:
    """Return the GPUs on which this process has a context; to ask another one for anything would make one there."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    has_context = torch._C._cuda_hasPrimaryContext
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]
