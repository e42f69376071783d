"""This machine's cores and GPUs, found without touching CUDA.

A kernel in which CUDA was initialised can no longer be forked for GPU work. NVIDIA's GPUs are therefore counted with
NVML, its management library, which does not initialise CUDA, and AMD's in a process of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
from pathlib import Path

from notebook_launcher.machine import nvml, rocm
from notebook_launcher.machine.visible_gpus import CUDA_VARIABLE, GPU, choose_visible
from notebook_launcher.wording.counts import plural

__all__ = ["GPU", "Machine", "detect", "torch_platform"]


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that ranks can use."""

    num_cores: int
    """CPU cores, within the limits of the process and its control group."""
    gpus: tuple[GPU, ...]
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order."""
    why_no_gpu: str
    """The reason why no GPU can be used, as a clause for the user; empty if GPUs can be used."""
    left_out: tuple[str, ...] = ()
    """GPUs that the driver counts and does not let this process use, each with the reason."""
    driver: str = ""
    """Version of NVIDIA's driver; empty: unknown."""
    variable: str = CUDA_VARIABLE
    """The environment variable that chooses the GPUs of a process."""


def detect() -> Machine:
    """Return the hardware of this machine."""
    found = _Found()
    with contextlib.suppress(OSError), contextlib.closing(nvml.Library()) as library:
        found = _detect_with_nvml(library)
    # A look at torch's files takes a quarter of all that a launch does before it asks for processes.
    platform = torch_platform() if found.gpus or rocm.has_driver() else ""
    if platform == "hip":
        found = _Found(rocm.detect_with_torch())
    gpus, why = found.gpus, found.problem
    if not gpus:
        why = why or "no GPU found" + "".join(f" ({reason})" for reason in found.left_out[:1])
        if "TPU_NAME" in os.environ or os.environ.get("PJRT_DEVICE") == "TPU":
            why += " (a TPU is asked for by TPU_NAME or PJRT_DEVICE, and TPUs are not supported)"
    elif not platform:
        why = f"{plural(len(gpus), 'GPU')} found, but this torch is built without CUDA"
    return Machine(
        num_cores=_num_cores(),
        gpus=gpus,
        why_no_gpu=why,
        left_out=found.left_out,
        driver=found.driver,
        variable=rocm.ROCM_VARIABLE if platform == "hip" else CUDA_VARIABLE,
    )


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


def torch_platform() -> str:
    """Return `cuda` or `hip`, for which torch is built; empty for neither."""
    # Read from torch's file, because the kernel may not have imported torch and need not.
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            found = re.search(r"^(cuda|hip)\b[^=\n]*= *'", text, re.MULTILINE)
            return "" if found is None else found[1]
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    gpus: tuple[GPU, ...] = ()
    problem: str = ""
    left_out: tuple[str, ...] = ()
    driver: str = ""


def _detect_with_nvml(library: nvml.Library) -> _Found:
    gpus: list[GPU] = []
    left_out: list[str] = []
    for index in range(library.count()):
        try:
            gpus.append(_gpu(library, index, index))
        except nvml.Unusable as reason:  # noqa: PERF203 - for each GPU by itself
            left_out.append(str(reason))
    choice = choose_visible(gpus, os.environ.get(CUDA_VARIABLE), functools.partial(_find_slice, library))
    return _Found(choice.gpus, choice.problem, tuple(left_out), library.driver())


def _gpu(library: nvml.Library, key: int | str, index: int) -> GPU:
    total, free, _ = library.memory(key) or (0, 0, 0)
    return GPU(
        index=index,
        name=library.name(key),
        total_memory=total,
        free_memory=free,
        capability=library.capability(key),
        uuid=library.uuid(key),
        selector=key if isinstance(key, str) else "",
    )


def _find_slice(library: nvml.Library, name: str, place: int) -> GPU | None:
    """Return a slice of a partitioned GPU; None: there is no such slice."""
    try:
        return _gpu(library, name, place)
    except nvml.Unusable:
        return None
