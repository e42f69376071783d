"""Typed records, with descriptors beside them, over an inherited socket pair.

SOCK_SEQPACKET keeps packets whole, so that several threads, and the data-loader workers that a rank forks, may
send on one socket without a lock. A record too large for a packet goes into an anonymous file whose descriptor is
sent instead. Only sockets that the kernel itself made carry records, so no data of other origin is unpickled.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import pickle
import socket
import termios
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PACKET_LIMIT = 65_536
"""Bytes of the largest packet, which must fit the socket's send buffer (212,992 bytes by default on Linux)."""
MAX_FDS = 8
ANCILLARY_SIZE = socket.CMSG_LEN(MAX_FDS * array.array("i").itemsize)
INLINE, SPILLED = b"\0", b"\1"
TAKEN_BUDGET = 1.0
"""Longest wait in seconds until a packet is received: a live reader takes a millisecond, and a reader that hangs must
not block the sender forever."""
TAKEN_INTERVAL = 0.0005


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file in memory; the file has no name and is freed with its last descriptor."""
    return os.memfd_create(f"notebook-launcher-{name}", os.MFD_CLOEXEC)


def read_tail(fd: int, size: int) -> str:
    """Return the end of a file as text, at most `size` bytes; empty if the descriptor is closed."""
    with contextlib.suppress(OSError):
        return os.pread(fd, size, max(0, os.fstat(fd).st_size - size)).decode(errors="replace").strip()
    return ""


class AnonymousFile:
    """A file in memory whose descriptor is closed with the last reference to this object, if not before.

    For the kernel's main thread, in which Ctrl-C may raise after any bytecode.

    Args:
        name: The end of a new file's name, as /proc shows it.
        fd: Descriptor of a file to take over; None: a new file.
    """

    _pid = -1  # Stays -1 if an interrupt cuts `__init__` short.

    def __init__(self, name: str = "", *, fd: int | None = None) -> None:
        self._fds: list[int] = [] if fd is None else [fd]
        self._pid = os.getpid()
        if fd is not None:
            return
        # One call in C, so that no interrupt can come between creating the file and storing its descriptor.
        self._fds.extend(map(os.memfd_create, [f"notebook-launcher-{name}"], [os.MFD_CLOEXEC]))

    def fileno(self) -> int:
        """Return the descriptor, which this object still owns; -1 once closed."""
        return self._fds[0] if self._fds else -1

    def detach(self) -> int:
        """Give the descriptor away."""
        return self._fds.pop()

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._fds:
            os.close(self._fds.pop())

    def __del__(self, getpid: Callable[[], int] = os.getpid, close: Callable[[int], None] = os.close) -> None:
        # In a forked process the number may belong to another file by now. When Python exits, `os` may be None here.
        if getpid() == self._pid and self._fds:
            close(self._fds.pop())


class Channel:
    """One end of a socket pair that carries records."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)  # The user's code may have called `socket.setdefaulttimeout`.
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

    def send_if_room(self, record: object) -> None:
        """Send a small record without descriptors, unless the other end is gone or has left many unread."""
        with contextlib.suppress(OSError):
            self._sock.send(INLINE + pickle.dumps(record, protocol=5), socket.MSG_DONTWAIT)

    def send_and_wait(self, record: object) -> None:
        """Send one record and wait until it is received, so that later output on other channels comes after it."""
        self.send(record)
        end = time.monotonic() + TAKEN_BUDGET
        with contextlib.suppress(OSError):  # A system without this `ioctl` does not wait.
            while any(fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4))) and time.monotonic() < end:
                time.sleep(TAKEN_INTERVAL)  # The number of bytes that the other end has not received is not 0.

    def receive(self, *, wait: bool = True) -> tuple[Any, list[int]] | None:
        """Return the next record and the descriptors beside it; None once the other end is closed.

        A record that cannot be unpickled is returned as `messages.Unreadable`. If this process has no room for all the
        descriptors, none is returned. With `wait=False`, raises BlockingIOError if no record has arrived.
        """
        # Not socket.recv_fds, which ignores its flags (Python 3.11).
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            packet, ancillary, arrived, _ = self._sock.recvmsg(PACKET_LIMIT + 1, ANCILLARY_SIZE, flags)
        except ConnectionError:
            return None
        fds = _descriptors(ancillary)
        if arrived & socket.MSG_CTRUNC:  # Linux has dropped some of them; nobody could assign the rest.
            while fds:
                os.close(fds.pop())
        if not packet:
            return None
        try:
            if packet[:1] == INLINE:
                return pickle.loads(memoryview(packet)[1:]), fds
            if not fds:
                return messages.Unreadable(reason="this process has no file descriptor left to receive it"), fds
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                return pickle.load(file), fds
        except Exception as error:  # whatever the record's own classes raise
            return messages.Unreadable(reason=f"{type(error).__name__}: {error}"), fds

    def is_at_end(self) -> bool:
        """Return True if the other end is closed and nothing is left to receive."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def detach(self) -> int:
        """Give the descriptor away."""
        return self._sock.detach()

    def close(self) -> None:
        """Close this end; idempotent."""
        self._sock.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def channel_pair() -> tuple[Channel, socket.socket]:
    """Return this process's end as a channel, and the other end as a socket to be passed on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(True)
    return Channel(ours), theirs
