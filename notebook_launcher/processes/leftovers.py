"""Traces that a killed process leaves: the out-of-memory killer's count, files in /dev/shm, and folders of sockets."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.machine import memory
from notebook_launcher.machine.memory import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterable


LISTENER = "/pymp-"
"""The beginning of the names of `multiprocessing`'s folders, in which its processes listen."""


def oom_kills() -> int:
    """Return the number of processes that the out-of-memory killer has killed in this control group or machine."""
    names = {1: "memory.oom_control", 2: "memory.events"}
    total = 0
    for file in (*(group.folder / names[group.version] for group in memory.memory_groups()), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            words = [line.split(" ") for line in file.read_text(encoding="ascii").splitlines()]
            total += sum(int(number) for name, number in words if name == "oom_kill")
    return total


def cleans_up(pid: int) -> bool:
    """Return True for the resource tracker of `multiprocessing`.

    Once its users have ended, it removes at once the `SharedMemory` and the semaphores that they have left, and ends.
    """
    return b"multiprocessing.resource_tracker" in _command(pid)


def ends_by_itself(pid: int) -> bool:
    """Return True for torch's manager of shared memory, with the sharing strategy "file_system".

    It removes its users' files and ends 2 seconds after they have ended: too long to wait for.
    """
    return b"torch_shm_manager" in _command(pid)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def session_members(session: int) -> set[int]:
    """Return the processes of a session."""
    members = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            after_name = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            if int(after_name.split()[3]) == session:  # State, parent, group, session.
                members.add(int(folder.name))
    return members


def mapped_files(pids: Iterable[int]) -> set[Path]:
    """Return the files of semaphores and of NCCL's connections in /dev/shm that these processes have mapped.

    `multiprocessing` shares semaphores with a fresh interpreter by name. Its resource tracker, a process of its own,
    removes the names that are left when their users have ended, but the tracker is killed with their session. NCCL
    unlinks each of its files when the peers have mapped it. A rank that is killed before leaves it behind, some MB for
    each peer, where a container may have 64 MB for all.
    """
    named: dict[int, Path] = {}
    for file in (*SHARED_MEMORY.glob("sem.mp-*"), *SHARED_MEMORY.glob("nccl-*")):
        with contextlib.suppress(OSError):
            named[file.stat().st_ino] = file
    found: set[Path] = set()
    for pid in pids if named else ():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            # By inode and not by name: the maker of a semaphore has mapped it under an earlier name.
            inodes = {int(line.split()[4]) for line in maps if f" {SHARED_MEMORY}/" in line}
            found |= {named[inode] for inode in inodes & named.keys()}
    return found


def listener_folders(pids: Iterable[int]) -> set[Path]:
    """Return the folders in which these processes listen for each other, as data-loader workers do.

    `multiprocessing` makes one for each worker, and removes it when the worker ends by itself.
    """
    folders: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines():
            *_, inode, path = line.split(maxsplit=7)
            if LISTENER in path:
                folders[f"socket:[{inode}]"] = Path(path).parent
    found: set[Path] = set()
    for pid in pids if folders else ():
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError, KeyError):
                    found.add(folders[str(fd.readlink())])
    return found


# --------------------------------------------------------------------------------------------------------------------
# Kills the sessions of ranks, and removes the shared files that their processes leave behind.


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
        members = session_members(leader)
        self._killed |= members
        # Without what this process has inherited: a fork of the kernel has the kernel's semaphores and sockets.
        self._left_files |= mapped_files(members) - mapped_files([os.getpid()])
        self._left_folders |= listener_folders(members) - listener_folders([os.getpid()])
        cleaners = set(filter(cleans_up, members))
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
        # A data-loader worker makes one for each batch, named after itself, and unlinks it a moment later.
        self._left_files |= {file for pid in self._killed for file in SHARED_MEMORY.glob(f"torch_{pid}_*")}
        self._killed.clear()
        while self._left_files:
            with contextlib.suppress(OSError):  # Another process has removed it.
                self._left_files.pop().unlink()
        while self._left_folders:
            shutil.rmtree(self._left_folders.pop(), ignore_errors=True)


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
