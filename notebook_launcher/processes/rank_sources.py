"""The ways in which a supervisor gets the processes of its ranks: forked, spawned, or forked ahead (`SpareRanks`)."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any, Protocol

from notebook_launcher.processes import boot

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages
    from notebook_launcher.processes.rank.rank_start import RankStart

__all__ = ["NewRanks", "RankSource"]


class RankSource(Protocol):
    """A way in which a supervisor gets the processes of its ranks."""

    @property
    def store(self) -> Any:
        """The server of the rendezvous store, if there is one already; otherwise None."""
        ...

    @property
    def waiting(self) -> set[int]:
        """The processes that wait to become ranks."""
        ...

    def enter(self, setup: messages.Setup) -> messages.Setup:
        """Enter the kernel's surroundings; return the settings as they are for the ranks."""
        ...

    def begin(self, start: RankStart) -> int:
        """Return the process number of a rank, which takes this start; 0 in the rank itself, if it is forked here."""
        ...


class NewRanks:
    """Ranks that are forked, or spawned, once they are asked for."""

    store: Any = None
    waiting: set[int] = set()  # noqa: RUF012 - always empty

    def enter(self, setup: messages.Setup) -> messages.Setup:
        """Enter the kernel's surroundings; return the settings as they are."""
        boot.enter_kernel_surroundings(setup)
        return setup

    def begin(self, start: RankStart) -> int:
        """Start a process; return its number, 0 in a forked rank itself."""
        return _spawn(start) if start.setup.start_method == "spawn" else os.fork()


def _spawn(start: RankStart) -> int:
    command, fds = boot.rank_command(start)
    try:
        process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
    finally:
        os.close(fds[-1])
    # The supervisor reaps by pid; Popen must not.
    process.returncode = 0
    return process.pid
