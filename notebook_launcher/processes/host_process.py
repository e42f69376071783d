"""The process around a host: it leaves the fork server's family, with a fork server of its own."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from notebook_launcher.messaging.channel import Channel, channel_pair
from notebook_launcher.processes import libraries

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Serve: TypeAlias = Callable[[Channel, int], None]
    """The life of a fork server; it gets the channel to its owner, and the owner's process number."""


def run_host(serve: Serve, module: str, host_fd: int) -> None:
    """Live as a host, whose life is `main` of a module, with a fork of this process as its fork server."""
    if server := _leave_with_server(serve, host_fd):
        libraries.name_process("host")
        importlib.import_module(module).main(host_fd, *server)


def _leave_with_server(serve: Serve, fd: int) -> tuple[Channel, int] | None:
    """Leave the fork server's family, with a fork of this process as own fork server.

    Args:
        serve: The life of the own fork server.
        fd: A descriptor that the own fork server has to close.

    Returns:
        The channel to the own fork server and its process number; None in a process that has nothing left to do.
    """
    os.setsid()  # A kernel is killed with its session, and a terminal sends its signals to one.
    if os.fork():
        return None  # The server reaps this process now, so that the host outlives it.
    ours, theirs = channel_pair()
    host_pid = os.getpid()
    server_pid = os.fork()
    if server_pid == 0:
        ours.close()
        os.close(fd)
        serve(Channel(theirs), host_pid)
        return None
    theirs.close()
    return ours, server_pid
