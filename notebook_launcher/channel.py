"""Typed records, with descriptors beside them, over an inherited socket pair.

SOCK_SEQPACKET keeps packets whole, so that several threads, and the data-loader workers that a rank
forks, may send on one socket without a lock. A record too large for a packet goes into an anonymous
file whose descriptor is sent instead. Only sockets that the kernel itself made carry records, so
nothing is unpickled that came from anywhere else.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import pickle
import socket
import struct
import termios
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AnonymousFile", "Channel", "anonymous_file", "channel_pair"]

# A packet must fit the socket's send buffer (212,992 bytes by default on Linux).
PACKET_LIMIT = 65_536
MAX_FDS = 8
ANCILLARY_SIZE = socket.CMSG_LEN(MAX_FDS * array.array("i").itemsize)
INLINE, SPILLED = b"\0", b"\1"
# A reader that lives answers within a millisecond; one that does not must not hold the sender up for good.
TAKEN_BUDGET = 1.0
TAKEN_INTERVAL = 0.0005


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file in memory that has no name and dies with its last holder."""
    return os.memfd_create(f"notebook-launcher-{name}", os.MFD_CLOEXEC)


class AnonymousFile:
    """The same with an owner: the descriptor is closed with its last reference, if not before.

    For the kernel's main thread, in which Ctrl-C may raise after any bytecode.
    """

    _pid = -1  # Of one whose `__init__` was cut short.

    def __init__(self, name: str) -> None:
        self._fds: list[int] = []
        self._pid = os.getpid()
        # One call in C: no exception can come between the file and its place in the list.
        self._fds.extend(map(os.memfd_create, [f"notebook-launcher-{name}"], [os.MFD_CLOEXEC]))

    def fileno(self) -> int:
        """Return the descriptor, which stays this object's; -1 once closed."""
        return self._fds[0] if self._fds else -1

    def detach(self) -> int:
        """Give the descriptor away."""
        return self._fds.pop()

    def close(self) -> None:
        """Let go of the file; idempotent."""
        if self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        # In a process that was forked the number may be another file's by now.
        if os.getpid() == self._pid:
            self.close()


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

    def send_and_wait(self, record: object) -> None:
        """Send one record, and wait until it was received, so that whatever is written elsewhere comes after it."""
        self.send(record)
        end = time.monotonic() + TAKEN_BUDGET
        with contextlib.suppress(OSError):  # A system that cannot tell does without the wait.
            while self._num_unread() and time.monotonic() < end:
                time.sleep(TAKEN_INTERVAL)

    def _num_unread(self) -> int:
        """Return how many bytes this end has sent that the other has not received; with the system's overhead."""
        (number,) = struct.unpack("i", fcntl.ioctl(self._sock, termios.TIOCOUTQ, struct.pack("i", 0)))
        return int(number)

    def receive(self, *, wait: bool = True) -> tuple[Any, list[int]] | None:
        """Return the next record and the descriptors beside it; None once the other end is gone.

        A record that cannot be unpickled here comes as `messages.Unreadable`. With `wait=False`, raises
        BlockingIOError if none has arrived.
        """
        # Not socket.recv_fds, which takes flags and does not pass them on (Python 3.11).
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            packet, ancillary, _, _ = self._sock.recvmsg(PACKET_LIMIT + 1, ANCILLARY_SIZE, flags)
        except ConnectionError:
            return None
        fds = _descriptors(ancillary)
        if not packet:
            return None
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


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors beside a packet."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return our end as a channel and the other end as a socket to be passed on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(True)
    return Channel(ours), theirs
