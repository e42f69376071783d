"""This machine's cores and GPUs, found without touching CUDA.

A kernel in which CUDA was initialised can no longer be forked for GPU work. GPUs are therefore counted with NVML,
NVIDIA's management library, which does not initialise CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from pathlib import Path

from notebook_launcher.machine import nvml
from notebook_launcher.units import plural

__all__ = ["GPU", "Machine", "look"]


@dataclasses.dataclass(frozen=True, slots=True)
class GPU:
    """One GPU as NVML sees it."""

    index: int
    name: str
    total_memory: int
    """Bytes."""
    free_memory: int
    """Bytes."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (9, 0); None: unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that ranks can use."""

    num_cores: int
    """CPU cores, within the limits of the process and its control group."""
    gpus: tuple[GPU, ...]
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order."""
    torch_has_cuda: bool
    why_no_gpu: str
    """The reason why no GPU can be used, as a clause for the user; empty if GPUs can be used."""


def look() -> Machine:
    """Return the hardware of this machine."""
    gpus = _visible(_nvml_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    has_cuda = _torch_has_cuda()
    why = ""
    if not gpus:
        why = "no GPU found"
    elif not has_cuda:
        why = f"{plural(len(gpus), 'GPU')} found, but this torch is built without CUDA"
    return Machine(num_cores=_num_cores(), gpus=gpus, torch_has_cuda=has_cuda, why_no_gpu=why)


def _num_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _cgroup_quota())))


def _cgroup_quota() -> float:
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        if int(quota) > 0:
            return int(quota) / int(period)
    return math.inf


def _torch_has_cuda() -> bool:
    # Read from torch's file, because the kernel may not have imported torch and need not.
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            return re.search(r"^(cuda|hip)\b[^=\n]*= *'", text, re.MULTILINE) is not None
    return False


def _nvml_gpus() -> list[tuple[GPU, str]]:
    """Return every GPU with its UUID; an empty list where NVML is missing or broken."""
    with contextlib.suppress(OSError), contextlib.closing(nvml.Library()) as library:
        return [(_gpu(library, index), library.uuid(index)) for index in range(library.count())]
    return []


def _gpu(library: nvml.Library, index: int) -> GPU:
    total, free, _ = library.memory(index) or (0, 0, 0)
    return GPU(
        index=index,
        name=library.name(index),
        total_memory=total,
        free_memory=free,
        capability=library.capability(index),
    )


def _visible(gpus: list[tuple[GPU, str]], variable: str | None) -> tuple[GPU, ...]:
    # CUDA's own rule: the list ends at the first entry that names no device.
    if variable is None:
        return tuple(gpu for gpu, _ in gpus)
    chosen: list[GPU] = []
    for item in variable.split(","):
        found = [gpu for gpu, uuid in gpus if item.strip() == str(gpu.index) or uuid.startswith(item.strip() or "?")]
        if not found:
            break
        chosen += found[:1]
    return tuple(chosen)
