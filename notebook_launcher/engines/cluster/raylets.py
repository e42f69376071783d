"""Raylets, Ray's own process on each node: which have ended. Ray itself needs up to 15 s to notice."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ended", "raylet_of_this_machine"]

CONNECT_PATIENCE = 0.5
"""Longest wait in seconds for all answers; a machine that gives none may only be slow."""
CREDENTIALS = "3i"


def raylet_of_this_machine() -> int:
    """Return a descriptor of the process that this driver is connected to, readable once it has ended.

    Raises:
        OSError: The process cannot be seen, as from another namespace of processes.
        AttributeError: This version of Ray has another name for its socket.
    """
    from ray._private import worker

    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(worker._global_node.raylet_socket_name)  # noqa: SLF001 - no public name has it
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(CREDENTIALS))
    return os.pidfd_open(struct.unpack(CREDENTIALS, found)[0])


def ended(nodes: Iterable[dict[str, Any]]) -> set[str]:
    """Return the identities of nodes whose machine answers that nothing listens at the raylet's port.

    Args:
        nodes: Nodes as `ray.nodes()` describes them.
    """
    refused: set[str] = set()
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        asked: dict[int, tuple[str, socket.socket]] = {}
        for node in nodes:
            address = node["NodeManagerAddress"], node["NodeManagerPort"]
            sock = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET))
            sock.setblocking(False)
            if sock.connect_ex(address) == errno.ECONNREFUSED:
                refused.add(node["NodeID"])
                continue
            asked[sock.fileno()] = node["NodeID"], sock
            poll.register(sock, select.POLLOUT)
        until = time.monotonic() + CONNECT_PATIENCE
        while asked and (ready := poll.poll(1e3 * max(0.0, until - time.monotonic()))):
            for fd, _ in ready:
                node_id, sock = asked.pop(fd)
                poll.unregister(fd)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                    refused.add(node_id)
    return refused
