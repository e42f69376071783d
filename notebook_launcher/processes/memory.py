"""Memory that outlives a process: the out-of-memory killer's count, and what a killed process left in /dev/shm."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["oom_kills", "remove_shared_files", "session_members"]

CGROUP_ROOT = Path("/sys/fs/cgroup")
SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 - where torch puts what its workers share
SESSION_FIELD = 3
"""In /proc/PID/stat, counted from the state, which follows the name."""


def oom_kills() -> int:
    """Return how often the out-of-memory killer has struck in this control group or on this machine."""
    return _count(_event_files(), "oom_kill") + _count([Path("/proc/vmstat")], "oom_kill")


def session_members(session: int) -> set[int]:
    """Return the processes of a session."""
    members = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[SESSION_FIELD]) == session:
                members.add(int(folder.name))
    return members


def remove_shared_files(pids: set[int]) -> None:
    """Remove the files of shared tensors that these processes made and were killed before removing.

    A data-loader worker makes one for each batch, named after itself, and unlinks it a moment later.
    """
    for pid in pids:
        for file in SHARED_FOLDER.glob(f"torch_{pid}_*"):
            file.unlink(missing_ok=True)


def _event_files() -> list[Path]:
    files = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            relative = path.lstrip("/")
            if not controllers:
                files.append(CGROUP_ROOT / relative / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(CGROUP_ROOT / "memory" / relative / "memory.oom_control")
    return files


def _count(files: list[Path], key: str) -> int:
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    total += int(value)
    return total
