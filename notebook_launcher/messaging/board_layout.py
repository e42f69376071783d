"""The layout of the board: 32 kB of memory that the kernel and all ranks map.

A rank looks at it at every step, which must cost nanoseconds. `engines/board.py` is the kernel's end.
"""

from __future__ import annotations

BOARD_SIZE = 32768

STOP_FLAG = 0
STOP_EACH, STOP_TOGETHER = 1, 2
"""Values of the stop flag: each rank stops at its own next step; all ranks stop after the same update."""
SAVES_ASKED = 1
"""Number of checkpoints that the kernel has asked for, modulo 256."""
HAS_SAFEPOINT = 2
"""1 once an Accelerator has made an update, so that it can save, and stop all ranks together."""
CHANGES_ASKED = 3
"""Number of the last `Change` that the kernel has sent to all ranks, modulo 256."""
ASKED = slice(4)
"""These four bytes, so that one look shows that nothing was asked for."""
LOSS_TOLD = 4
"""1 + the call's number modulo 255, once a rank has told that its loss is NaN or infinite."""
SAVE_CHOICE = slice(8, 24)
"""Rank 0's answer, two 64-bit integers: the request, and the update after which all ranks save;
`training.requests.agreement` reads and writes it."""
STOP_CHOICE = slice(24, 40)
"""The same pair for the update after which all ranks stop."""
CHANGE_CHOICE = slice(40, 56)
"""The same pair for the update after which all ranks carry out the changes."""
COOPERATIVE = 64
"""Rank r sets byte COOPERATIVE + r once it reads the board."""
NUM_KEPT = 16
"""Collectives of a rank whose marks are kept, a power of two."""
MAX_RANKS = (BOARD_SIZE - COOPERATIVE) // (3 + NUM_KEPT)
ACTIVITY = COOPERATIVE + MAX_RANKS
"""Byte ACTIVITY + r has the activity of rank r: COMPUTING, WAITING, SAVING or ENDED of `context`."""
COLLECTIVES = ACTIVITY + MAX_RANKS
"""Byte COLLECTIVES + r counts the gathers, reductions and optimizer steps of sharded models of rank r in this call,
from 1 to 255 and from 1 again; 0: none, or the rank is on another machine. `training.parallelism.unit_order` has both
these and the marks."""
ORDERS = COLLECTIVES + MAX_RANKS
"""The `NUM_KEPT` bytes from ORDERS + NUM_KEPT * r on are the marks of the last of them, at their number modulo
`NUM_KEPT`."""
