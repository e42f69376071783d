"""The control groups that account for this process' memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

ROOT = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One control group."""

    version: Literal[1, 2]
    mount: Path
    """The root of its hierarchy."""
    folder: Path
    """Inside a container /proc/self/cgroup may have the host's path: then there is no such folder here, and the
    nearest parent that exists, at the latest the mount, is the container's own group."""


def memory_groups() -> list[MemoryGroup]:
    """Return this process' groups, at most one of each version; none where there are no control groups."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups.append(MemoryGroup(2, ROOT, ROOT / path.strip("/")))
        elif "memory" in controllers.split(","):
            groups.append(MemoryGroup(1, ROOT / "memory", ROOT / "memory" / path.strip("/")))
    return groups


# --------------------------------------------------------------------------------------------------------------------
# The folder in which Linux keeps the shared memory of all processes.


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
"""Torch puts there what data-loader workers share, and NCCL what ranks share."""
