"""Ranks that are forked ahead: they have joined their process group, and wait for the launch that takes them.

    fork server ──channel──▶ spare supervisor ──a channel each──▶ spare rank 0 … spare rank N-1

Until then nothing of the launch is known but its kind, so they hold what depends on the kind alone: the environment,
the import path, the working directory and the group, whose store the spare supervisor hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging.channel import Channel, channel_pair
from notebook_launcher.processes import boot
from notebook_launcher.processes.store import bind_and_listen, host_store

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages
    from notebook_launcher.processes.rank.rank_start import RankStart

__all__ = ["SpareRanks", "kind_of_launch"]

MAX_SPARE_RANKS = 8
"""The most ranks that are kept: each holds some MB that it does not share."""
LOOPBACK = "127.0.0.1"
"""Address of the store where all ranks are on the kernel's machine."""
BACKENDS = ("gloo", "nccl", None)
"""Backends whose group holds no memory of a GPU before its first collective; None: no group."""


def kind_of_launch(setup: messages.Setup) -> messages.Setup | None:
    """Return the settings that spare ranks share with their launch; None for a launch that gets no spare ranks.

    Ranks take the others (the run's number, the random states, and whether a session's calls follow) from the launch
    itself.
    """
    is_small = setup.num_processes <= MAX_SPARE_RANKS
    # Between two launches nothing may listen in a network.
    is_here = setup.place.num_nodes == 1 and setup.place.store_address == LOOPBACK
    if setup.backend not in BACKENDS or not (is_small and is_here):
        return None
    return dataclasses.replace(
        setup,
        run_id="",
        ends_at=None,
        random=None,
        rank_seeds=None,
        many_calls=False,
        keeps_failures=False,
        master_port=0,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    pid: int
    channel: Channel
    """Takes the start of the rank."""


class SpareRanks:
    """The spare ranks of a supervisor, and the store in which they have met.

    Args:
        kind: Their settings.
    """

    def __init__(self, kind: messages.Setup) -> None:
        self._waiting: dict[int, _Waiting] = {}
        """By rank."""
        self._listener = bind_and_listen(kind.place, kind.num_processes)
        """The socket of the store."""
        self.kind = dataclasses.replace(kind, master_port=self._listener.getsockname()[1])
        """Their settings, with the port of the store."""
        self.store: Any = None
        """The server of the store; None until the ranks are forked, and in a rank."""

    def fork(self) -> tuple[int, Channel] | None:
        """Fork the ranks and return None; in a rank, return its number and the channel to its supervisor."""
        for rank in self.kind.place.ranks:
            ours, theirs = channel_pair()
            pid = os.fork()
            if pid == 0:
                self._listener.close()
                for waiting in self._waiting.values():
                    waiting.channel.close()
                ours.close()
                return rank, Channel(theirs)
            theirs.close()
            self._waiting[rank] = _Waiting(pid, ours)
        self.store = host_store(self.kind, self._listener.detach())
        return None

    def wait(self, channel: Channel) -> bool:
        """Wait until a launch arrives or the other end is closed; return False if a rank has died meanwhile."""
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            for waiting in self._waiting.values():
                poll.register(fd := os.pidfd_open(waiting.pid), select.POLLIN)
                stack.callback(os.close, fd)
            return all(fd == channel.fileno() for fd, _ in poll.poll())

    @property
    def waiting(self) -> set[int]:
        """The processes that wait to become ranks."""
        return {waiting.pid for waiting in self._waiting.values()}

    def enter(self, setup: messages.Setup) -> messages.Setup:
        """Enter the kernel's folder; return the settings with the port of the store.

        The other surroundings were known ahead, but the folder may have been replaced by another of its name.
        """
        boot.enter_folder(setup)
        return dataclasses.replace(setup, master_port=self.kind.master_port)

    def begin(self, start: RankStart) -> int:
        """Hand a waiting rank its start, and return its process number; fork a rank if it has begun before."""
        waiting = self._waiting.pop(start.rank, None)
        if waiting is None:
            return os.fork()
        with contextlib.suppress(OSError), contextlib.closing(waiting.channel):  # A rank that has died is reaped soon.
            waiting.channel.send(start, [start.channel_fd, start.stdout_fd, start.stderr_fd, start.board_fd])
        return waiting.pid

    def kill(self) -> None:
        """Kill and reap the ranks that still wait."""
        for waiting in self._waiting.values():
            os.kill(waiting.pid, signal.SIGKILL)
            os.waitpid(waiting.pid, 0)
        self._waiting.clear()
