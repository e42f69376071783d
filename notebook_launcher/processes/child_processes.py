"""The children of this process."""

from __future__ import annotations

import contextlib
import os
import select

__all__ = ["children", "wait_for_end"]


def children() -> list[int]:
    """Return the process numbers of this process's children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as children:
            return [int(pid) for pid in children.read().split()]
    except OSError:
        return []


def wait_for_end(pid: int, seconds: float) -> None:
    """Wait for a child's end, and reap it."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            end = select.poll()
            end.register(pidfd, select.POLLIN)
            end.poll(max(0.0, seconds) * 1000)
        finally:
            os.close(pidfd)
        os.waitpid(pid, os.WNOHANG)
