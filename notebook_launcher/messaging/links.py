"""A link: records over a pair of descriptors, between the kernel and an agent, or a host and its client.

Every record is a pickle after its length, and unpickling can run any code. So both ends are of one user: an agent is a
program that the kernel started, and a host and its client ask the system for the other end's user before the first
record (`detached/host_socket.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import struct
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = struct.Struct("<Q")
LONGEST_RECORD = 1 << 40
"""Bytes of a record that no machine could hold: such a length is not one, but a stream that something has spoilt."""
LONGEST_LINE = 1 << 24
READ_SIZE = 1 << 16
"""Bytes that are read at once: as many as a pipe holds. For more, each read would map fresh memory."""
MAX_PARTS = 512
"""Parts in one write; the system takes 1,024."""
LOOK_EVERY = 0.25
"""Seconds between two looks of a thread that waits: has the link been given up meanwhile?"""


class LinkError(OSError):
    """The other end is gone, or has been silent for too long.

    The message is a reason alone: who shows it names the node. Also raised where the stream holds no records.
    """


class SilentError(LinkError):
    """The other end is there, and has been silent for too long."""


class Link:
    """One end of a link. Any thread may send; one thread receives.

    Args:
        read_fd: Descriptor to read from.
        write_fd: Descriptor to write to.
        patience: Seconds for which `send` waits for room; None: as long as it takes.
    """

    def __init__(self, read_fd: int, write_fd: int, patience: float | None = None) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._patience = math.inf if patience is None else patience
        self._is_given_up = False
        if patience is not None:
            # Where a network is cut, no peer makes room, and a thread that is inside of `write` cannot be called back.
            os.set_blocking(write_fd, False)
        self._sending = threading.Lock()
        self._closing = threading.Lock()
        self._unread = bytearray()

    def send(self, *records: object) -> None:
        """Send records, in one write if there is room; raises OSError if the other end is gone, or makes no room."""
        payloads = [pickle.dumps(record, protocol=5) for record in records]
        parts = [memoryview(part) for payload in payloads for part in (HEAD.pack(len(payload)), payload)]
        with self._sending:
            while parts:
                size = self._write(parts[:MAX_PARTS])
                while parts and size >= len(parts[0]):
                    size -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][size:]

    def give_up(self) -> None:
        """Let `send` and `receive` fail from now on, also in a thread that waits: in `send` only with `patience`."""
        self._is_given_up = True

    def _write(self, parts: Sequence[memoryview]) -> int:
        while not self._is_given_up:
            with contextlib.suppress(BlockingIOError):
                return os.writev(self._write_fd, parts)
            if not self._await(self._write_fd, select.POLLOUT, self._patience):
                self.give_up()  # The other end has a part of a record, so no other can follow.
        raise LinkError("the other end has taken nothing for too long")

    def receive(self, patience: float | None = None) -> Any:
        """Return the next record; raises `LinkError` at the end, and after `patience` seconds without a byte.

        Raises what unpickling raises, too; then the link is of no further use.
        """
        head = self._read(HEAD.size, patience)
        length = int(HEAD.unpack(head)[0])
        if length > LONGEST_RECORD:
            raise LinkError(
                f"what arrives are no messages: one would have {length} bytes. Something else writes into the stream"
            )
        return pickle.loads(self._read(length, patience))

    def read_line(self, patience: float | None = None) -> bytes:
        """Return the next line of text, before the first record; raises as `receive` does."""
        while (end := self._unread.find(b"\n")) < 0:
            if len(self._unread) > LONGEST_LINE:
                raise LinkError("what arrives are no messages: a first line without an end")
            self._fill(patience)
        return self._read(end + 1, patience)

    def _read(self, size: int, patience: float | None) -> bytes:
        while len(self._unread) < size:
            self._fill(patience)
        data = bytes(memoryview(self._unread)[:size])
        del self._unread[:size]
        return data

    def _fill(self, patience: float | None) -> None:
        """Read what has arrived; wait if nothing has."""
        try:
            is_readable = self._await(self._read_fd, select.POLLIN, math.inf if patience is None else patience)
            data = os.read(self._read_fd, READ_SIZE) if is_readable else b""
        except (OSError, ValueError) as error:
            raise LinkError(str(error)) from error
        if not (is_readable or self._is_given_up):
            raise SilentError(f"no message arrived for {patience:g} s")
        if not data:
            raise LinkError("the link has ended")
        self._unread += data

    def _await(self, fd: int, event: int, patience: float) -> bool:
        """Wait until a descriptor is ready; return False if it is not in time, or the link is given up.

        Only the time counts in which this thread watches: one that was held up finds what has arrived.
        """
        # Not `select.select`, which refuses descriptors above 1023: a kernel with many nodes has more.
        poll = select.poll()
        poll.register(fd, event)
        watched = 0.0
        while not self._is_given_up and watched < patience:
            if poll.poll(1e3 * min(LOOK_EVERY, patience - watched)):
                return True
            watched += LOOK_EVERY
        return False

    def close_sending(self) -> None:
        """Announce to the other end that nothing more comes; idempotent."""
        with self._closing, contextlib.suppress(OSError):
            fd, self._write_fd = self._write_fd, -1
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """Close both directions, when no thread receives any more; idempotent."""
        self.close_sending()
        with self._closing, contextlib.suppress(OSError):
            fd, self._read_fd = self._read_fd, -1
            if fd >= 0:
                os.close(fd)
