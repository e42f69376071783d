"""Which process writes a run's folder, and whether it still lives.

No lock is held: a descriptor would be inherited by every process that the user forks, and would keep the
lock after the kernel's death. A process number and the moment of its start name a process of this
machine until it reboots.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

__all__ = ["SILENCE", "identify", "is_alive"]

SILENCE = 60.0
"""Seconds without a new summary after which a kernel of another machine or container counts as dead.
One that lives writes every 5 s (`recorder.py`)."""


def identify() -> dict[str, Any]:
    """Return what names this process, as JSON has it."""
    pid = os.getpid()
    return {"pid": pid, "start": _start_of(pid), **_machine()}


def is_alive(owner: object, *, age: float) -> bool:
    """Tell whether the process that `identify` named lives.

    Args:
        owner: What `identify` returned there.
        age: Seconds since it last wrote: what counts if it cannot be seen from here.
    """
    if not isinstance(owner, dict):
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or not _machine().items() <= owner.items():
        return age < SILENCE
    return _start_of(pid) == owner.get("start") is not None


def _start_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None if it is gone or a zombie."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the name, which may hold anything, also parentheses: see proc(5).
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    return None


@functools.cache
def _machine() -> dict[str, str]:
    """Return what tells where a process number means this process."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the text is no path
    return {"boot": boot, "pid_namespace": namespace}
