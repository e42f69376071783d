"""The board: requests of the kernel for the ranks' next step, and the states that the ranks report.

`messaging/messages.py` lists the bytes of the memory that the ranks map; the kernel knows this class alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.messaging import board_layout, messages

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableSequence


class Board:
    """Requests to the ranks of one tree, and their state, in memory that both map."""

    def __init__(self, memory: Any) -> None:
        self.memory: MutableSequence[Any] = memory

    def clear(self) -> None:
        """Take back all requests, and forget the ranks' state, before a call begins."""
        self.memory[:] = bytes(board_layout.BOARD_SIZE)

    def ask_to_stop(self, *, together: bool) -> None:
        """Ask the ranks to stop: all after the same update, or each at its own next step."""
        self.memory[board_layout.STOP_FLAG] = board_layout.STOP_TOGETHER if together else board_layout.STOP_EACH

    def ask_to_save(self) -> None:
        """Ask the ranks for one more checkpoint."""
        self.memory[board_layout.SAVES_ASKED] = (self.memory[board_layout.SAVES_ASKED] + 1) % 256

    def announce_change(self, number: int) -> None:
        """Announce to the ranks that this many changes are in their channels."""
        self.memory[board_layout.CHANGES_ASKED] = number % 256

    @property
    def has_safepoint(self) -> bool:
        """True once an Accelerator has made an update, so that it can save, and stop all ranks together."""
        return bool(self.memory[board_layout.HAS_SAFEPOINT])

    def is_read_by(self, rank: int) -> bool:
        """Return True if a rank looks at the board at its steps."""
        return bool(self.memory[board_layout.COOPERATIVE + rank])

    def activity_of(self, rank: int) -> int:
        """Return a rank's activity: COMPUTING, WAITING, SAVING or ENDED."""
        return int(self.memory[board_layout.ACTIVITY + rank])


# --------------------------------------------------------------------------------------------------------------------
# Metrics, progress and phases of training on their way from another machine, of which ranks send many a second.


LIVE = (messages.Metrics, messages.Progress, messages.Phases)


@dataclasses.dataclass(frozen=True, slots=True)
class LiveRecords:
    """Records of ranks on one node, in the order in which they were sent.

    They stay pickled until the run's thread adds them up. A thousand ranks send 12,000 a second. While these wait as
    objects, the garbage collector looks at them again and again: that took a quarter of all work on them.
    """

    pickled: bytes
    offset: float
    """Seconds by which the kernel's clock is ahead of the times in them."""

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield each record with its rank."""
        return iter(pickle.loads(self.pickled))


# --------------------------------------------------------------------------------------------------------------------
# Activity and memory of a process, read from outside: it is not asked, so this costs it nothing.


ASLEEP = "SD"
"""States of a thread that sleeps, as /proc names them."""
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class Pulse(NamedTuple):
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
