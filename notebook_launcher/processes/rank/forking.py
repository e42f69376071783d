"""Makes a rank's own forks, above all of data-loader workers, safe from its threads on older Pythons.

Before Python 3.10.15 and 3.11.10 a forked child copied the lock on the list of threads in its parent's state
(https://github.com/python/cpython/issues/112275). A thread of gloo that drops the last tensor of a collective holds
that lock for a moment, so workers that were forked right after a collective could wait forever: about once in 20
epochs of three workers on two ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

__all__ = ["has_the_defect", "let_threads_settle", "settle_before_a_fork", "settle_before_forks"]

# Usually two looks in 0.2 ms suffice; a thread that computes for longer than 50 ms is not waited for.
PATIENCE_S = 0.05
BETWEEN_LOOKS_S = 0.0001


def settle_before_a_fork() -> None:
    """Wait once until other threads rest, if this Python needs it."""
    if has_the_defect(sys.version_info[:3]):
        let_threads_settle()


def settle_before_forks() -> None:
    """Wait until other threads rest before each fork of this process, if this Python needs it."""
    if has_the_defect(sys.version_info[:3]):
        os.register_at_fork(before=let_threads_settle)


def has_the_defect(version: tuple[int, int, int]) -> bool:
    """Return True if a fork of this Python version, given as (major, minor, micro), may copy a lock that is held."""
    return version < (3, 10, 15) or (3, 11) <= version < (3, 11, 10)


def let_threads_settle() -> None:
    """Wait until no other thread of this process runs, for 50 ms at most.

    Sleeping releases the interpreter's lock, so that threads that wait for the lock continue and come to rest too.
    """
    tasks = Path("/proc/self/task")
    this_one = str(threading.get_native_id())
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        time.sleep(BETWEEN_LOOKS_S)
        if not any(_runs(thread) for thread in tasks.iterdir() if thread.name != this_one):
            return


def _runs(thread: Path) -> bool:
    with contextlib.suppress(OSError):  # The thread has ended.
        # "tid (name) state ...": a name may hold spaces and brackets.
        return (thread / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"R", b"D")
    return False
