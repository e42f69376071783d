"""A test of `start_method="fork"`: a throw-away child tries what the ranks will need.

A forked child has the kernel's memory but none of its threads. If the kernel has run a parallel operation, the
threads of GNU OpenMP's pool are missing in the child, which hangs at its first parallel operation. If the kernel has
touched CUDA, the child cannot use CUDA. The kernel itself cannot detect either case reliably
(`torch.cuda.is_initialized()` does not see what other libraries did), so a child is forked to test both.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import select
import signal
import sys
import warnings
from typing import TYPE_CHECKING

from notebook_launcher.errors import ConfigError

if TYPE_CHECKING:
    from notebook_launcher.kernel.plan import Plan

__all__ = ["ForkHealth", "adapt", "try_fork"]

BUDGET = 1.0
"""Time limit of the child in seconds; a healthy child needs less than a millisecond for the parallel operation."""
DRIVER_BUDGET = 15.0
"""Time limit of the child in seconds if it asks the driver, which may wake up every GPU first."""
CUDA_SUCCESS = 0
CUDA_POISONED = b"c"
CUDA_CLEAN = b"-"
PARALLEL_WORKS = b"p"


@dataclasses.dataclass(frozen=True, slots=True)
class ForkHealth:
    """Test results of a fork of this process."""

    cuda: bool
    parallel: bool


def try_fork() -> ForkHealth:
    """Fork a child and return what works in it; call it only where torch is imported."""
    answers = _ask_child()
    return ForkHealth(cuda=CUDA_CLEAN in answers, parallel=PARALLEL_WORKS in answers)


def adapt(plan: Plan) -> Plan:
    """Return a plan that works in a fork of this process; raises `ConfigError` if none does."""
    if "torch" not in sys.modules or (plan.threads_per_process == 1 and not plan.use_gpu):
        return plan
    health = try_fork()
    if plan.use_gpu and not health.cuda:
        raise ConfigError(
            "start_method='fork' with GPUs: this kernel has touched CUDA, and a fork of it cannot use a GPU. Use "
            "start_method='forkserver', which does not depend on what the kernel did, or restart the kernel."
        )
    if health.parallel or plan.threads_per_process == 1:
        return plan
    note = " (this kernel has run parallel operations, so a fork of it can run none)"
    return dataclasses.replace(plan, threads_per_process=1, note=note)


def _ask_child() -> bytes:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _answer(writer)
    os.close(writer)
    answers = b""
    try:
        budget = BUDGET if _loaded_driver() is None else DRIVER_BUDGET
        while select.select([reader], [], [], budget)[0]:
            chunk = os.read(reader, 16)
            if not chunk:
                break
            answers += chunk
            budget = BUDGET  # The driver answers first.
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return answers


def _answer(writer: int) -> None:
    try:
        signal.set_wakeup_fd(-1)
        import torch

        # torch sets this in a forked child, and nowhere else.
        poisoned = torch.cuda._is_in_bad_fork() or _driver_refuses()  # noqa: SLF001
        os.write(writer, CUDA_POISONED if poisoned else CUDA_CLEAN)
        # Large enough that torch splits it among threads (32,768 elements an intra-op grain).
        torch.ones(1 << 18).add_(1)
        os.write(writer, PARALLEL_WORKS)
    finally:
        os._exit(0)


def _loaded_driver() -> ctypes.CDLL | None:
    """Return CUDA's driver library if this process has loaded it: without it CUDA is not initialised."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def _driver_refuses() -> bool:
    """Return True if the driver does not work in this forked child.

    It refuses (CUDA_ERROR_NOT_INITIALIZED) where the parent had initialised it, by whatever library: torch sees only
    what it did itself, not CuPy or JAX.
    """
    driver = _loaded_driver()
    return driver is not None and driver.cuInit(0) != CUDA_SUCCESS
