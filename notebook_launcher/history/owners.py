"""Identity of the process that writes a run's folder, and a check that the process still lives.

No lock is held: every process that the user forks would inherit its descriptor, and would keep the lock after the
kernel's death. A process id and the time of its start identify a process of this machine until it reboots.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

__all__ = ["SILENCE", "identify", "is_alive", "is_stopped", "start_of"]

SILENCE = 60.0
"""Seconds without a new summary after which a kernel of another machine or container counts as dead. A kernel that
lives writes one every 5 s (`recorder.py`)."""


def identify() -> dict[str, Any]:
    """Return the identity of this process, as plain data for JSON."""
    pid = os.getpid()
    return {"pid": pid, "start": start_of(pid), **_machine()}


def is_alive(owner: object, *, age: float) -> bool:
    """Return True if the process that `identify` named still lives.

    Args:
        owner: The identity, as `identify` returned it in that process.
        age: Seconds since the process last wrote. They decide if the process cannot be seen from here.
    """
    if not isinstance(owner, dict):
        return False
    pid = owner.get("pid")
    if not isinstance(pid, int) or not _machine().items() <= owner.items():
        return age < SILENCE
    return start_of(pid) == owner.get("start") is not None


def start_of(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; None if it has ended or is a zombie."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = _stat_of(pid)
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    return None


def is_stopped(pid: int) -> bool:
    """Return True if a process of this machine was stopped (SIGSTOP), so that it does nothing until it is continued."""
    with contextlib.suppress(OSError, IndexError):
        return _stat_of(pid)[0] == b"T"
    return False


def _stat_of(pid: int) -> list[bytes]:
    """Return what proc(5) has in /proc/PID/stat after the name, which may hold anything, also parentheses."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


@functools.cache
def _machine() -> dict[str, str]:
    """Return the boot and the namespace in which a process id names a process of this machine."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the text is not a path
    return {"boot": boot, "pid_namespace": namespace}
