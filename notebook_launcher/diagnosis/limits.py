"""Limits of this process: cores, memory, shared memory, open files, processes."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from notebook_launcher.diagnosis.finding import Finding
from notebook_launcher.machine import devices
from notebook_launcher.machine.shared_memory import SHARED_MEMORY
from notebook_launcher.travel.memory_limit import available_memory
from notebook_launcher.wording.counts import plural
from notebook_launcher.wording.units import format_bytes

__all__ = ["look_at_limits", "open_files", "shared_memory"]

AREA = "limits"
FILES_PER_RANK = 6
"""Descriptors that a kernel needs for each rank while it starts."""
FEW_RANKS = 16
"""A limit that leaves room for fewer ranks is worth a warning."""
SMALL_SHM = 1_000_000_000
"""Bytes of /dev/shm under which data-loader workers run out of room; Docker gives 64 MB by itself."""


def look_at_limits() -> list[Finding]:
    """Return what this process may take of the machine."""
    machine = devices.detect()
    cores = plural(machine.num_cores, "core")
    if (every := os.cpu_count() or 0) > machine.num_cores:
        cores += f" of {every}: the rest is taken away by affinity or by a control group"
    import psutil

    memory = f"{format_bytes(available_memory())} free of {format_bytes(psutil.virtual_memory().total)}"
    return [
        Finding(area=AREA, name="cores", fact=cores),
        Finding(area=AREA, name="memory", fact=memory),
        shared_memory(str(SHARED_MEMORY)),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        _processes(),
        Finding(area=AREA, name="locked memory (ulimit -l)", fact=_amount(resource.RLIMIT_MEMLOCK)),
    ]


def shared_memory(folder: str) -> Finding:
    """Return the size of the file system through which data-loader workers send their batches."""
    name = f"{folder}, for data-loader workers"
    try:
        room = os.statvfs(folder)
    except OSError as error:
        advice = "mount it: mount -t tmpfs tmpfs /dev/shm; or DataLoader(..., num_workers=0)"
        return Finding(area=AREA, name=name, fact=error.strerror or "missing", verdict="problem", advice=advice)
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    fact = f"{format_bytes(free)} free of {format_bytes(size)}"
    if free >= SMALL_SHM:
        return Finding(area=AREA, name=name, fact=fact)
    advice = "docker run --shm-size=8g ..., or DataLoader(..., num_workers=0); `df -h /dev/shm` shows who fills it"
    return Finding(area=AREA, name=name, fact=fact, verdict="warning", advice=advice)


def open_files(soft: int, hard: int) -> Finding:
    """Return the limit on open files as a number of ranks."""
    name = "open files (ulimit -n)"
    if soft == resource.RLIM_INFINITY:
        return Finding(area=AREA, name=name, fact="unlimited")
    taken = len(list(Path("/proc/self/fd").iterdir()))
    room = max(0, soft - taken) // FILES_PER_RANK
    fact = f"{soft:,}, {taken:,} in use: room for {plural(room, 'rank')}"
    if room >= FEW_RANKS:
        return Finding(area=AREA, name=name, fact=fact)
    raised = "unlimited" if hard == resource.RLIM_INFINITY else hard
    advice = f"ulimit -n {raised} in the shell that starts Jupyter"
    return Finding(area=AREA, name=name, fact=fact, verdict="problem" if room < 2 else "warning", advice=advice)


def _processes() -> Finding:
    name, fact = "processes (ulimit -u)", _amount(resource.RLIMIT_NPROC, size=False)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/pids.max").read_text("ascii"))
        now = int(Path("/sys/fs/cgroup/pids.current").read_text("ascii"))
        fact += f"; the container has {now:,} of {limit:,}"
        if limit - now < FEW_RANKS:
            advice = f"docker run --pids-limit={2 * limit} ..., or stop other processes"
            return Finding(area=AREA, name=name, fact=fact, verdict="warning", advice=advice)
    return Finding(area=AREA, name=name, fact=fact)


def _amount(kind: int, *, size: bool = True) -> str:
    soft, _ = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return format_bytes(soft) if size else f"{soft:,}"
