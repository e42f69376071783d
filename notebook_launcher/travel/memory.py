"""How much memory this process may still take: the machine's, or less where a control group says so."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory", "format_size"]

CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes that can be taken without swapping or meeting a control group's limit."""
    import psutil  # about 10 ms, and only large parcels ask

    available = psutil.virtual_memory().available
    try:
        memberships = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return available
    for line in memberships:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            left = _room_in_group(CGROUP_ROOT, group, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            left = _room_in_group(CGROUP_ROOT / "memory", group, names)
        else:
            continue
        available = min(available, left)
    return available


def _room_in_group(mount: Path, group: str, names: tuple[str, str, str]) -> int:
    """Return the smallest room among a group and its ancestors.

    Inside a container the path in /proc/self/cgroup may be the host's: the folders that do not exist
    here are passed over, and the walk ends at the mount, which is then the container's own group.
    """
    limit_name, usage_name, reclaimable_name = names
    folder = mount / group.strip("/")
    room = 1 << 62
    for parent in (folder, *folder.parents):
        if parent != mount and mount not in parent.parents:
            break
        try:
            limit = int((parent / limit_name).read_text())
            used = int((parent / usage_name).read_text())
            stat = (parent / "memory.stat").read_text().split()
        except (OSError, ValueError):  # no such group here, or the limit is "max"
            continue
        reclaimable = int(dict(zip(stat[::2], stat[1::2], strict=False)).get(reclaimable_name, 0))
        room = min(room, max(0, limit - used + reclaimable))
    return room


def format_size(num_bytes: int) -> str:
    """Return `12.0 GB`, in powers of 1000 as torch and disks count."""
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
