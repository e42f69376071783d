"""Kills the sessions of ranks, and removes the shared files that their processes leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from typing import TYPE_CHECKING

from notebook_launcher.processes import leftovers

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SessionKiller"]


class SessionKiller:
    """Kills sessions, and remembers what is to be removed once their leaders have exited."""

    def __init__(self) -> None:
        self._killed: set[int] = set()
        """Processes that were killed, whose shared files are still to be removed."""
        self._left_files: set[Path] = set()
        """Files of named semaphores, and of NCCL's connections, that killed processes leave behind."""
        self._left_folders: set[Path] = set()
        """Folders in which killed processes listened for each other."""

    def kill(self, leader: int) -> None:
        """Kill all processes of a session, but let its clean-up helpers end by themselves.

        Args:
            leader: Process number of the rank that leads the session, or is about to.
        """
        members = leftovers.session_members(leader)
        self._killed |= members
        # Without what this process has inherited: a fork of the kernel has the kernel's semaphores and sockets.
        self._left_files |= leftovers.named_semaphores(members) - leftovers.named_semaphores([os.getpid()])
        self._left_files |= leftovers.nccl_segments(members)
        self._left_folders |= leftovers.listener_folders(members) - leftovers.listener_folders([os.getpid()])
        cleaners = set(filter(leftovers.cleans_up, members))
        for member in members - cleaners if cleaners else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        if not cleaners:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)  # A rank that was just forked has no session of its own yet.

    def remove_files(self) -> None:
        """Remove the shared files of the processes that were killed."""
        leftovers.remove_shared_files(self._killed)
        self._killed.clear()
        while self._left_files:
            with contextlib.suppress(OSError):  # Another process has removed it.
                self._left_files.pop().unlink()
        while self._left_folders:
            shutil.rmtree(self._left_folders.pop(), ignore_errors=True)
