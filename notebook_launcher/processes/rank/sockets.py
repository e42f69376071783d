"""Lists the sockets that a piece of code opens, and shuts their connections down."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

__all__ = ["hang_up", "open_sockets"]

DESCRIPTORS = Path("/proc/self/fd")


def open_sockets() -> dict[str, int]:
    """Return this process's sockets: `socket:[inode]`, which no other socket has, and a descriptor."""
    found: dict[str, int] = {}
    for descriptor in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # The descriptor that listed the folder is closed by now.
            target = str(descriptor.readlink())
            if target.startswith("socket:"):
                found[target] = int(descriptor.name)
    return found


def hang_up(sockets: set[str]) -> None:
    """Shut down the connections that are still open, so that their readers see the end of file."""
    for target, fd in open_sockets().items():
        if target in sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
                if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    end.shutdown(socket.SHUT_RDWR)
