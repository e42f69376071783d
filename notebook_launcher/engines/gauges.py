"""Activity and memory of a process, read from outside: it is not asked, so this costs it nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

__all__ = ["Pulse", "resident_memory"]

ASLEEP = "SD"
"""States of a thread that sleeps, as /proc names them."""
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True, slots=True)
class Pulse:
    """Activity of a process: state and sleeps of its main thread, processor time of all its threads."""

    is_asleep: bool
    num_sleeps: int
    ticks: int

    @classmethod
    def read(cls, pid: int) -> Pulse | None:
        """Return the pulse of a process; None if it is gone, or if this system does not count sleeps."""
        try:
            _, _, after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")
            fields = after_name.split()
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
            num_sleeps = int(status.partition("\nvoluntary_ctxt_switches:")[2].split(None, 1)[0])
            return cls(fields[0] in ASLEEP, num_sleeps, int(fields[11]) + int(fields[12]))
        except (OSError, IndexError, ValueError):
            return None


def resident_memory(pid: int) -> int | None:
    """Return the resident memory of a process in bytes; None if it is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE_SIZE
    return None
