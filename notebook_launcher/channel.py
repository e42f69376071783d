"""Typed records, with descriptors beside them, over an inherited socket pair.

SOCK_SEQPACKET keeps packets whole, so that several threads, and the data-loader workers that a rank
forks, may send on one socket without a lock. A record too large for a packet goes into an anonymous
file whose descriptor is sent instead. Only sockets that the kernel itself made carry records, so
nothing is unpickled that came from anywhere else.
"""

from __future__ import annotations

import os
import pickle
import socket
from typing import TYPE_CHECKING, Any

from notebook_launcher import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Channel", "anonymous_file", "channel_pair"]

# A packet must fit the socket's send buffer (212,992 bytes by default on Linux).
PACKET_LIMIT = 65_536
MAX_FDS = 8
INLINE, SPILLED = b"\0", b"\1"


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file in memory that has no name and dies with its last holder."""
    return os.memfd_create(f"notebook-launcher-{name}", os.MFD_CLOEXEC)


class Channel:
    """One end of a socket pair that carries records."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # Whatever `socket.setdefaulttimeout` the user's code has called.
        self._sock = sock

    def fileno(self) -> int:
        """Return the descriptor, for selectors; -1 once closed."""
        return self._sock.fileno()

    def send(self, record: object, fds: Sequence[int] = ()) -> None:
        """Send one record; raises OSError (BrokenPipeError, ConnectionError) if the other end is gone."""
        payload = pickle.dumps(record, protocol=5)
        if len(payload) < PACKET_LIMIT:
            socket.send_fds(self._sock, [INLINE, payload], fds)
            return
        spill = anonymous_file("record")
        try:
            with open(spill, "wb", closefd=False) as file:
                file.write(payload)
            socket.send_fds(self._sock, [SPILLED], [*fds, spill])
        finally:
            os.close(spill)

    def receive(self, *, wait: bool = True) -> tuple[Any, list[int]] | None:
        """Return the next record and the descriptors beside it; None once the other end is gone.

        A record that cannot be unpickled here comes as `messages.Unreadable`. With `wait=False`, raises
        BlockingIOError if none has arrived.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            packet, fds, _, _ = socket.recv_fds(self._sock, PACKET_LIMIT + 1, MAX_FDS, flags)
        except ConnectionError:
            return None
        if not packet:
            return None
        for fd in fds:
            os.set_inheritable(fd, False)
        try:
            if packet[:1] == INLINE:
                return pickle.loads(memoryview(packet)[1:]), fds
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                return pickle.load(file), fds
        except Exception as error:  # noqa: BLE001 - whatever the record's own classes raise
            return messages.Unreadable(reason=f"{type(error).__name__}: {error}"), fds

    def detach(self) -> int:
        """Give the descriptor away."""
        return self._sock.detach()

    def close(self) -> None:
        """Close this end; idempotent."""
        self._sock.close()


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return our end as a channel and the other end as a socket to be passed on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(True)
    return Channel(ours), theirs
