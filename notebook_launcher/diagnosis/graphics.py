"""GPUs by NVML: driver, memory, the processes that use them, and access of one GPU to another's memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import time

from notebook_launcher.diagnosis.finding import Finding
from notebook_launcher.machine import devices, nvml
from notebook_launcher.wording.units import format_bytes, format_seconds

__all__ = ["look_at_gpus"]

AREA = "GPUs"
SLOW_LOOK = 0.5
"""Seconds that finding the GPUs may take; with loaded GPUs it takes some hundredths."""
MOSTLY_TAKEN = 0.5
"""Part of a GPU's memory; if others have taken more, a launch may run out of it."""


def look_at_gpus() -> list[Finding]:
    """Return what NVML knows of each visible GPU; one fact if there is none."""
    began = time.monotonic()
    machine = devices.detect()
    seconds = time.monotonic() - began
    if not machine.gpus:
        return [Finding(area=AREA, name="GPUs", fact=machine.why_no_gpu)]
    findings = []
    if machine.why_no_gpu:
        advice = "install a torch that is built for CUDA: https://pytorch.org/get-started/locally"
        findings = [Finding(area=AREA, name="GPUs", fact=machine.why_no_gpu, verdict="problem", advice=advice)]
    with contextlib.suppress(OSError), contextlib.closing(nvml.Library()) as library:
        findings.append(Finding(area=AREA, name="driver", fact=library.driver() or "unknown"))
        findings += _start(library, machine.gpus[0], seconds)
        findings += [_gpu(library, place, gpu) for place, gpu in enumerate(machine.gpus)]
        whole = [gpu for gpu in machine.gpus if not gpu.is_slice]  # Slices of a GPU have no access to each other.
        findings += [_pair(library, gpu.index, other.index) for gpu, other in itertools.combinations(whole, 2)]
    findings += [Finding(area=AREA, name="left out", fact=reason, verdict="warning") for reason in machine.left_out]
    return findings


def _start(library: nvml.Library, gpu: devices.GPU, seconds: float) -> list[Finding]:
    """Return a warning if each launch has to wait for the driver to load the GPUs first."""
    if seconds < SLOW_LOOK or library.stays_loaded(gpu.key) is not False:
        return []
    fact = f"finding them took {format_seconds(seconds)}, as it will at each launch: persistence mode is off"
    advice = "sudo nvidia-smi -pm 1, or start nvidia-persistenced: the driver then keeps unused GPUs loaded"
    return [Finding(area=AREA, name="start", fact=fact, verdict="warning", advice=advice)]


def _gpu(library: nvml.Library, place: int, gpu: devices.GPU) -> Finding:
    others = [pid for pid in library.processes(gpu.key) if pid != os.getpid()]
    users = ", ".join(f"{pid} ({_command(pid)})" for pid in others)
    fact = f"{gpu.name}, {format_bytes(gpu.free_memory)} free of {format_bytes(gpu.total_memory)}"
    name = f"GPU {place}"
    fact += f"; used by {users}" if others else ""
    if others and gpu.free_memory < MOSTLY_TAKEN * gpu.total_memory:
        advice = f"end process {others[0]}, or choose other GPUs with devices=[...]"
        return Finding(area=AREA, name=name, fact=fact, verdict="warning", advice=advice)
    return Finding(area=AREA, name=name, fact=fact)


def _pair(library: nvml.Library, one: int, other: int) -> Finding:
    name, path = f"GPU {one} to {other}", library.distance(one, other)
    reachable = library.peer_access(one, other)
    if reachable is None:
        return Finding(area=AREA, name=name, fact=f"{path}; peer access unknown")
    if reachable or os.environ.get("NCCL_P2P_DISABLE") == "1":
        return Finding(area=AREA, name=name, fact=f"{path}; peer access {'works' if reachable else 'is switched off'}")
    fact = f"{path}; no peer access, so data goes through the host's memory"
    advice = 'if a launch with NCCL hangs or fails: env={"NCCL_P2P_DISABLE": "1"}'
    return Finding(area=AREA, name=name, fact=fact, verdict="warning", advice=advice)


def _command(pid: int) -> str:
    import psutil

    try:
        return " ".join(psutil.Process(pid).cmdline())[:60] or "a process without a command"
    except psutil.Error:
        return "of another user or container"
