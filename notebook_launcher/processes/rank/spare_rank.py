"""A rank that is forked ahead: it joins its group, and waits for the launch that takes it."""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import TYPE_CHECKING

from notebook_launcher.processes import boot, inherited, libraries
from notebook_launcher.processes.rank import cores_and_gpu, rank_process
from notebook_launcher.processes.rank.rank import serve_kernel
from notebook_launcher.processes.rank.rank_rehearsal import rehearse
from notebook_launcher.processes.rank.rendezvous import Rendezvous, torchrun_environment

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages
    from notebook_launcher.messaging.channel import Channel

__all__ = ["run_spare_rank"]


def run_spare_rank(rank: int, kind: messages.Setup, channel: Channel, name: str) -> int:
    """Join the group ahead, wait at `channel` for the launch, and serve the kernel; return the exit status.

    Args:
        rank: The rank.
        kind: The settings of the ranks, as far as they are known ahead.
        channel: The channel to the supervisor, which passes the start of the rank on.
        name: Name of the process once it has been started.
    """
    rank_process.begin()
    inherited.forget_parent(kind.start_method)
    os.environ.update(torchrun_environment(kind, rank))
    rendezvous = Rendezvous(rank, kind)
    cores_and_gpu.set_threads(kind.threads_per_process)
    rendezvous.join(0)
    rehearse(rank, kind, rendezvous)
    received = channel.receive()
    channel.close()
    if received is None:
        return 0
    libraries.name_process(name)
    start, (channel_fd, stdout_fd, stderr_fd, board_fd) = received
    start = dataclasses.replace(
        start, channel_fd=channel_fd, stdout_fd=stdout_fd, stderr_fd=stderr_fd, board_fd=board_fd
    )
    boot.enter_folder(start.setup)  # The folder may have been replaced by another of its name.
    importlib.invalidate_caches()  # The user may have written modules meanwhile.
    rank_process.redirect_output(start)
    return serve_kernel(start, rendezvous)
