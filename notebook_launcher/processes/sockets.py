"""The sockets that a piece of code opens, and how to hang up on all of them."""

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
        with contextlib.suppress(OSError):  # The one that lists them is closed by now.
            target = str(descriptor.readlink())
            if target.startswith("socket:"):
                found[target] = int(descriptor.name)
    return found


def hang_up(sockets: set[str]) -> None:
    """Shut those of these connections down that are still open, so that whoever reads from them sees their end."""
    for target, fd in open_sockets().items():
        if target in sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
                if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    end.shutdown(socket.SHUT_RDWR)
