"""How a process outside the kernel comes up: its command line, and the surroundings it shares with the kernel."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from notebook_launcher.channel import anonymous_file

if TYPE_CHECKING:
    from notebook_launcher import messages
    from notebook_launcher.processes.rank import RankStart

__all__ = ["command", "enter_kernel_surroundings", "rank_command", "read_rank_start"]

Role = Literal["forkserver", "supervisor", "rank"]

# `-c` rather than `-m`: the package must be found even where only the kernel's `sys.path` leads to it, and
# the folder of the notebook must not come first, where a file named like a module of the standard library
# would be imported instead.
BOOTSTRAP = (
    "import sys; sys.path[:] = [p for p in sys.path if p] + [{root!r}]; "
    "from notebook_launcher.processes.{role} import main; main({fd})"
)


def command(role: Role, fd: int) -> list[str]:
    """Return the command line of a fresh interpreter in this role; `fd` is what it inherits."""
    root = str(Path(__file__).resolve().parents[2])
    # The last word is for people who look at a process list; nothing reads it.
    return [sys.executable, "-c", BOOTSTRAP.format(root=root, role=role, fd=fd), f"notebook_launcher.processes.{role}"]


def rank_command(start: RankStart) -> tuple[list[str], list[int]]:
    """Return the command line of a spawned rank and the descriptors it needs, its birth record last."""
    fd = anonymous_file("rank-start")
    with open(fd, "wb", closefd=False) as file:
        pickle.dump(start, file)
    return command("rank", fd), [start.channel_fd, start.stdout_fd, start.stderr_fd, start.board_fd, fd]


def read_rank_start(fd: int) -> RankStart:
    """Return what `rank_command` wrote."""
    with open(fd, "rb") as file:
        file.seek(0)
        start: RankStart = pickle.load(file)
    return start


def enter_kernel_surroundings(setup: messages.Setup) -> None:
    """Take over the kernel's present environment, import path, arguments and working directory."""
    os.environ.clear()
    os.environ.update(setup.environ)
    sys.path[:] = setup.sys_path
    sys.argv[:] = setup.argv
    with contextlib.suppress(OSError):
        os.chdir(setup.cwd)
