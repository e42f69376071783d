"""The board: requests of the kernel for the ranks' next step, and the states that the ranks report.

`messaging/board_layout.py` lists the bytes of the memory that the ranks map; the kernel knows this class alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging import board_layout

if TYPE_CHECKING:
    from collections.abc import MutableSequence

__all__ = ["Board"]


class Board:
    """Requests to the ranks of one tree, and their state, in memory that both map.

    Args:
        memory: The memory; ranks of this machine map it too.
    """

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
