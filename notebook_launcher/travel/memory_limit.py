"""The memory that this process may still take: the machine's, or less within a control group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.machine import cgroups

if TYPE_CHECKING:
    from notebook_launcher.machine.cgroups import MemoryGroup

__all__ = ["available_memory"]

FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the files with the limit and the use, and the part of the use that can be reclaimed."""


def available_memory() -> int:
    """Return the bytes that can be taken without swapping or meeting a control group's limit."""
    import psutil  # about 10 ms, and only large parcels ask

    rooms = [_room_in(group) for group in cgroups.memory_groups()]
    return min([psutil.virtual_memory().available, *rooms])


def _room_in(group: MemoryGroup) -> int:
    """Return the smallest room among a group and its ancestors; folders that do not exist here are skipped."""
    limit_name, usage_name, reclaimable_name = FILES[group.version]
    room = 1 << 62
    for folder in (group.folder, *group.folder.parents):
        if folder != group.mount and group.mount not in folder.parents:
            break
        try:
            limit = int((folder / limit_name).read_text())
            used = int((folder / usage_name).read_text())
            stat = (folder / "memory.stat").read_text().split()
        except (OSError, ValueError):  # no such group here, or the limit is "max"
            continue
        reclaimable = int(dict(zip(stat[::2], stat[1::2], strict=False)).get(reclaimable_name, 0))
        room = min(room, max(0, limit - used + reclaimable))
    return room
