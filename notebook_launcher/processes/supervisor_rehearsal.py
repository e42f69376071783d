"""The preparation of a spare supervisor, which has time until its launch arrives.

A forked process pays for each page of memory that it shares and changes, and running a function of Python changes its
page, because references are counted there. After the rehearsal the pages of a supervisor's code are its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel, channel_pair
from notebook_launcher.processes import boot
from notebook_launcher.processes.supervisor import Supervisor

if TYPE_CHECKING:
    from notebook_launcher.processes.rank.rank_start import RankStart
    from notebook_launcher.processes.spare_ranks import SpareRanks

__all__ = ["rehearse"]


def rehearse(spare: SpareRanks) -> None:
    """Supervise a launch of one rank, which ends at once; the spare ranks, which are forked already, take no part."""
    kernel, ours = channel_pair()
    channel = Channel(ours)
    kernel.send(messages.StartSupervisor(setup=spare.kind, is_interactive=True, needs=()))
    channel.receive()
    kernel.send(spare.kind, [kernel.fileno()] * 2)
    kernel.send(messages.StartRank(rank=spare.kind.place.ranks[0]), [kernel.fileno()] * 3)
    kernel.send(messages.Close())
    supervisor = Supervisor(channel, _OneThatEnds(spare))
    supervisor.serve()
    supervisor.kill_ranks()
    supervisor.close()
    os.close(supervisor.board_fd)
    kernel.close()


class _OneThatEnds:
    """A source of ranks that end as soon as they have begun."""

    def __init__(self, spare: SpareRanks) -> None:
        self.store = spare.store
        self.waiting = spare.waiting

    def enter(self, setup: messages.Setup) -> messages.Setup:
        """Enter the kernel's folder; return the settings as they are."""
        boot.enter_folder(setup)
        return setup

    def begin(self, start: RankStart) -> int:  # noqa: ARG002
        """Fork a process that ends, and return its process number."""
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return pid
