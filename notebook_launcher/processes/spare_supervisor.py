"""The supervisor of spare ranks: a supervisor that forks its ranks before it knows their launch."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, NoReturn

from notebook_launcher.messaging.channel import Channel
from notebook_launcher.processes import boot, libraries
from notebook_launcher.processes.rank.spare_rank import run_spare_rank
from notebook_launcher.processes.spare_ranks import SpareRanks
from notebook_launcher.processes.supervisor import end_with, lead, supervise
from notebook_launcher.processes.supervisor_rehearsal import rehearse

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages

__all__ = ["run_spare_supervisor"]


def run_spare_supervisor(kind: messages.Setup, fd: int, server_pid: int) -> NoReturn:
    """Start ranks ahead, wait for the launch that takes them, and supervise them; never returns.

    Exits if the fork server ends or has no use for the ranks, and if a rank dies.

    Args:
        kind: Their settings, as far as they are known ahead.
        fd: Descriptor of the channel at which the fork server passes the launch on.
        server_pid: Process number of the fork server.
    """
    end_with(lambda: _live(kind, Channel(socket.socket(fileno=fd)), server_pid))


def _live(kind: messages.Setup, channel: Channel, server_pid: int) -> int:
    name = libraries.name_process(f"spare {server_pid}")
    lead()
    boot.enter_kernel_surroundings(kind)
    spare = SpareRanks(kind)
    own = spare.fork()
    if own is not None:
        channel.close()
        rank, from_supervisor = own
        return run_spare_rank(rank, spare.kind, from_supervisor, name)
    rehearse(spare)
    received = channel.receive() if spare.wait(channel) else None
    channel.close()
    if received is None:
        spare.kill()
        return 0
    libraries.name_process(name)
    _, (kernel_fd,) = received
    return supervise(socket.socket(fileno=kernel_fd), spare)
