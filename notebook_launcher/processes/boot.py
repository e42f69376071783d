"""The start of a process outside the kernel: its command line, and the kernel's environment that it takes over."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import warnings
from typing import TYPE_CHECKING, Literal

from notebook_launcher.messaging.channel import anonymous_file
from notebook_launcher.tracebacks import PACKAGE_FOLDER

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages
    from notebook_launcher.processes.rank.rank_process import RankStart

Role = Literal["forkserver", "supervisor", "rank.rank"]
"""The module of a process, in this package."""

WARNINGS = "PYTHONWARNINGS"
# `-c` and not `-m`: the package must be found even if only the kernel's `sys.path` contains it, and the notebook's
# folder must not come first, because a file there with the name of a standard module would be imported instead.
BOOTSTRAP = (
    "import sys; sys.path[:] = [p for p in sys.path if p] + [{root!r}]; "
    # Python 3.13 takes this line for the source of all code that says <string>, such as an eval() of the user's.
    "__import__('linecache').cache.pop('<string>', None); "
    "from notebook_launcher.processes.{role} import main; main({fd})"
)


def command(role: Role, fd: int) -> list[str]:
    """Return the command line of a fresh interpreter in this role; `fd` is the descriptor that it inherits."""
    root = str(PACKAGE_FOLDER.parent)
    # The last argument is for people who look at a list of processes; no code reads it.
    return [sys.executable, "-c", BOOTSTRAP.format(root=root, role=role, fd=fd), f"notebook_launcher.processes.{role}"]


def rank_command(start: RankStart) -> tuple[list[str], list[int]]:
    """Return the command line of a spawned rank and the descriptors that it needs; the last one has its `RankStart`."""
    fd = anonymous_file("rank-start")
    with open(fd, "wb", closefd=False) as file:
        pickle.dump(start, file)
    return command("rank.rank", fd), [start.channel_fd, start.stdout_fd, start.stderr_fd, start.board_fd, fd]


def enter_kernel_surroundings(setup: messages.Setup) -> None:
    """Set environment, import path, arguments and working directory to the kernel's values at the launch."""
    given, own = (environ.get(WARNINGS, "") for environ in (setup.environ, os.environ))
    os.environ.clear()
    os.environ.update(setup.environ)
    if given != own:  # The interpreter has read it when it started; a fork has not.
        warnings._processoptions([option for option in given.split(",") if option])  # type: ignore[attr-defined]
    sys.path[:] = setup.sys_path
    sys.argv[:] = setup.argv
    with contextlib.suppress(OSError):
        os.chdir(setup.cwd)
