"""A link: records over a pair of descriptors, between the kernel and an agent, or a host and its client.

Every record is a pickle after its length, and unpickling can run any code. So both ends are of one user: an agent is a
program that the kernel started, and a host and its client ask the system for the other end's user before the first
record (`detached/host_socket.py`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = struct.Struct("<Q")
LONGEST_RECORD = 1 << 40
"""Bytes of a record that no machine could hold: such a length is not one, but a stream that something has spoilt."""
LONGEST_LINE = 1 << 24
"""Bytes of a line of text before the first record."""
READ_SIZE = 1 << 16
"""Bytes that are read at once: as many as a pipe holds. For more, each read would map fresh memory."""
MAX_PARTS = 512
"""Parts in one write; the system takes 1,024."""
LOOK_EVERY = 0.25
"""Seconds between two looks of a thread that waits for room in the link: has it ended meanwhile?"""


class LinkError(OSError):
    """The other end is gone, or has been silent for too long.

    The message is a reason alone: who shows it names the node. Also raised where the stream holds no records.
    """


class SilentError(LinkError):
    """The other end is there, and has been silent for too long."""


class Link:
    """One end of a link. Any thread may send; one thread receives.

    `receive` waits for the next record. A thread that has several links waits for all of them by itself, and calls
    `read` and `whole_records` for each that is readable.

    Args:
        read_fd: Descriptor to read from.
        write_fd: Descriptor to write to.
        patience: Seconds for which `send` waits for room; None: as long as it takes.
    """

    def __init__(self, read_fd: int, write_fd: int, patience: float | None = None) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._patience = float("inf") if patience is None else patience
        self._is_given_up = False
        """True if nothing is sent any more."""
        if patience is not None:
            # Where a network is cut, no peer makes room, and a thread that is inside of `write` cannot be called back.
            os.set_blocking(write_fd, False)
        self._sending = threading.Lock()
        self._closing = threading.Lock()
        self._unread = bytearray()
        """Bytes that have arrived and were not returned yet."""

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
        """Let `send` fail from now on; with `patience` also where it waits for room in another thread."""
        self._is_given_up = True

    def _write(self, parts: Sequence[memoryview]) -> int:
        """Write some bytes of the parts, and return their number."""
        until = time.monotonic() + self._patience
        while not self._is_given_up:
            with contextlib.suppress(BlockingIOError):
                return os.writev(self._write_fd, parts)
            if time.monotonic() > until:
                self.give_up()  # The other end has a part of a record, so no other can follow.
            _wait_for(self._write_fd, select.POLLOUT, LOOK_EVERY)
        raise LinkError("the other end has taken nothing for too long")

    def receive(self, patience: float | None = None) -> Any:
        """Return the next record; raises `LinkError` at the end, and after `patience` seconds without a byte.

        Raises what unpickling raises, too; then the link is of no further use.
        """
        while (end := self._end_of_record(0)) is None:
            self._fill(patience)
        return self._take_record(end)

    def read_line(self, patience: float | None = None) -> bytes:
        """Return the next line of text, before the first record; raises as `receive` does."""
        while (line := self.next_line()) is None:
            self._fill(patience)
        return line

    def read(self) -> None:
        """Read once what has arrived, for `next_line` and `whole_records`; waits only if nothing has.

        Raises:
            LinkError: The link has ended.
        """
        try:
            data = os.read(self._read_fd, READ_SIZE)
        except OSError as error:
            raise LinkError(str(error)) from error
        if not data:
            raise LinkError("the link has ended")
        self._unread += data

    def next_line(self) -> bytes | None:
        """Return the next line of text, as far as it has been read; None: not all of it has."""
        if (end := self._unread.find(b"\n")) < 0:
            if len(self._unread) > LONGEST_LINE:
                raise LinkError(f"its output begins with a line of more than {LONGEST_LINE} bytes")
            return None
        line = bytes(memoryview(self._unread)[: end + 1])
        del self._unread[: end + 1]
        return line

    def whole_records(self) -> list[Any]:
        """Return the records that have been read to their end; raises as `receive`."""
        at, records = 0, []
        with memoryview(self._unread) as unread:
            while (end := self._end_of_record(at)) is not None:
                records.append(pickle.loads(unread[at + HEAD.size : end]))
                at = end
        del self._unread[:at]
        return records

    def _end_of_record(self, start: int) -> int | None:
        """Return the end of the record that begins at this byte; None: it has not been read yet."""
        if len(self._unread) < start + HEAD.size:
            return None
        length = int(HEAD.unpack_from(self._unread, start)[0])
        if length > LONGEST_RECORD:
            raise LinkError(
                f"what arrives are no messages: one would have {length} bytes. Something else writes into the stream"
            )
        end = start + HEAD.size + length
        return end if end <= len(self._unread) else None

    def _take_record(self, end: int) -> Any:
        payload = bytes(memoryview(self._unread)[HEAD.size : end])
        del self._unread[:end]
        return pickle.loads(payload)

    def _fill(self, patience: float | None) -> None:
        # Silence: no byte arrives while this thread watches. A thread that was held up finds the bytes.
        try:
            is_readable = _wait_for(self._read_fd, select.POLLIN, patience)
        except (OSError, ValueError) as error:
            raise LinkError(str(error)) from error
        if not is_readable:
            raise SilentError(f"no message arrived for {patience:g} s")
        self.read()

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


def _wait_for(fd: int, event: int, seconds: float | None) -> bool:
    """Wait until a descriptor is ready; return False if it is not in time."""
    # Not `select.select`, which refuses descriptors above 1023: a kernel with many nodes has more.
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(None if seconds is None else 1e3 * seconds))
