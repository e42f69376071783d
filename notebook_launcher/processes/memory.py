"""What the control group says of memory: the out-of-memory killer's count."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["oom_kills"]

CGROUP_ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Return how often the out-of-memory killer has struck in this control group or on this machine."""
    return _count(_event_files(), "oom_kill") + _count([Path("/proc/vmstat")], "oom_kill")


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
