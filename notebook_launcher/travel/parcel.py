"""A pickle and its buffers in one anonymous file in memory: how it is laid out, written and mapped.

    0        header: magic, length of the pickle, number of buffers, where the table lies, its length
    64       the pickle, then the buffers, each on a multiple of 64 bytes
    table    offset and length of every buffer, then the notes

Buffers are written once, straight from where they live. Every reader maps the file privately; small parcels are copied
instead, since a mapping of a file holds a descriptor (before Python 3.13). `pwrite` is used, not a copy into a mapping:
it skips the page faults (0.5 s against 0.85 s a GB), and a full memory is an error here, not a SIGBUS.
"""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

from notebook_launcher.errors import ResourceError
from notebook_launcher.machine import memory
from notebook_launcher.messaging.channel import AnonymousFile
from notebook_launcher.wording import format_bytes

if TYPE_CHECKING:
    import pickle

    from notebook_launcher.machine.memory import MemoryGroup


MAGIC = b"nblparc1"
HEADER = struct.Struct("<8sQQQQ")
ENTRY = struct.Struct("<QQ")
ALIGNMENT = 64
WRITE_LIMIT = 64 << 20
"""Bytes of one write. A longer one could not be interrupted: tmpfs looks for signals only between system calls."""
UNCHECKED_SIZE = 64 << 20
"""Bytes up to which nobody asks the system how much memory is left, which takes about 0.3 ms."""
COPIED_SIZE = 1 << 20
PLAIN_SIZE = 1 << 15
"""Bytes up to which a value without buffers is read, not mapped: the mapping takes three times as long as all else that
such a value needs."""


class Notes(NamedTuple):
    """What is known of a packed call without unpacking it."""

    modules: tuple[str, ...] = ()
    """Names of the modules that it refers to."""
    replaced: tuple[str, ...] = ()
    """Attributes of libraries that the notebook has replaced, and whose values travel for the first time."""
    left: tuple[str, ...] = ()
    """Those whose values cannot travel, each with the reason."""


class ParcelWriter:
    """A parcel that is being written: the file object to which a pickler writes, and its buffer callback.

    `name` is shown in /proc; `what` names the content in error messages, with its verb.
    """

    def __init__(self, name: str, *, what: str) -> None:
        self._file = AnonymousFile(name)
        self._is_sealed = False
        self._what = what
        self._start = bytearray(ALIGNMENT)
        """The header's room and the pickle's beginning, which are written together: most parcels are no longer."""
        self._end = ALIGNMENT
        self._checked_end = UNCHECKED_SIZE
        self._buffers: list[memoryview] = []

    def write(self, data: bytes) -> int:
        """Append to the pickle."""
        if self._end + len(data) > self._checked_end:
            self._require(len(data))
            self._checked_end = self._end + len(data) + UNCHECKED_SIZE
        if self._end == len(self._start) and self._end + len(data) < PLAIN_SIZE:
            self._start += data
            self._end += len(data)
        else:
            self._end = self._write_at(data, self._end)
        return len(data)

    def add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        """Add a buffer, which is read when the parcel is sealed."""
        self._buffers.append(buffer.raw())

    @property
    def size(self) -> int:
        """Bytes of the pickle and the buffers so far."""
        return self._end + sum(view.nbytes for view in self._buffers)

    def check_room(self) -> None:
        """Raise ResourceError if there is no memory for the buffers."""
        needed = sum(view.nbytes + ALIGNMENT for view in self._buffers)
        if needed > UNCHECKED_SIZE:
            self._require(needed)

    def seal(self, notes: Notes | None = None) -> AnonymousFile:
        """Write the buffers and return the file; raises ResourceError if memory is short."""
        self.check_room()
        pickle_length = self._end - ALIGNMENT
        lengths = [view.nbytes for view in self._buffers]
        table = bytearray()
        for view, length in zip(self._buffers, lengths, strict=True):
            offset = _aligned(self._end)
            table += ENTRY.pack(offset, length)
            self._end = self._write_at(view, offset)
        self._buffers.clear()
        table += b"" if notes is None else json.dumps(notes).encode()
        offset = _aligned(self._end)
        if self._end == len(self._start):
            self._start += bytes(offset - self._end) + table
        else:
            self._write_at(table, offset)
        HEADER.pack_into(self._start, 0, MAGIC, pickle_length, len(lengths), offset, len(table))
        self._write_at(self._start, 0)
        self._is_sealed = True
        return self._file

    def discard(self) -> None:
        """Free what was written, unless the parcel was sealed."""
        self._buffers.clear()
        if not self._is_sealed:
            self._file.close()

    def _write_at(self, data: bytes | bytearray | memoryview, offset: int) -> int:
        """Write all of `data` and return the offset of its end."""
        with memoryview(data) as whole, whole.cast("B") as view:
            done = 0
            try:
                while done < len(view):
                    done += os.pwrite(self._file.fileno(), view[done : done + WRITE_LIMIT], offset + done)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                    raise self._short_of(offset + len(view)) from error
                raise
            return offset + done

    def _require(self, needed: int) -> None:
        if needed > available_memory():
            raise self._short_of(needed)

    def _short_of(self, needed: int) -> ResourceError:
        return ResourceError(
            f"{self._what} {format_bytes(needed)} of shared memory, "
            f"{format_bytes(available_memory())} are available; send less, or load it inside the function"
        )


class Parcel:
    """A parcel that arrived: a private mapping of its file, or a copy of it."""

    def __init__(self, memory: mmap.mmap | bytes) -> None:
        magic, _, num_buffers, table, table_length = HEADER.unpack_from(memory)
        if magic != MAGIC:
            raise ValueError("the descriptor does not hold a parcel")
        view = memoryview(memory)
        self.buffers = [
            view[offset : offset + length]
            for offset, length in ENTRY.iter_unpack(view[table : table + ENTRY.size * num_buffers])
        ]
        self.notes = _decode(bytes(view[table + ENTRY.size * num_buffers : table + table_length]))
        self.file = io.BytesIO(memory) if isinstance(memory, bytes) else memory
        """Positioned at the pickle; its memory lives as long as any of the buffers."""
        self.file.seek(ALIGNMENT)


def open_parcel(fd: int) -> Parcel:
    """Map a parcel and close its descriptor; the content is writable, and private to this process."""
    try:
        return Parcel(_read_plain(fd) or _map(fd))
    finally:
        os.close(fd)


def _read_plain(fd: int) -> bytes | None:
    """Return the whole of a small parcel without buffers, as most calls and values are; None for a larger one."""
    start = os.pread(fd, PLAIN_SIZE, 0)
    if not HEADER.size <= len(start) < PLAIN_SIZE:
        return None
    _, _, num_buffers, *_ = HEADER.unpack_from(start)
    return None if num_buffers else start


def read_notes(fd: int) -> Notes:
    """Return the notes of a parcel, and leave the descriptor open."""
    _, _, num_buffers, table, length = HEADER.unpack(os.pread(fd, HEADER.size, 0))
    entries = ENTRY.size * num_buffers
    return _decode(os.pread(fd, length - entries, table + entries))


def _decode(notes: bytes) -> Notes:
    return Notes(*map(tuple, json.loads(notes))) if notes else Notes()


def _map(fd: int) -> mmap.mmap:
    size = os.fstat(fd).st_size
    if size <= COPIED_SIZE:
        copy = mmap.mmap(-1, max(size, HEADER.size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Not read(): the offset of the descriptor is shared by all ranks that hold the file.
        os.preadv(fd, [copy], 0)
        return copy
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY, trackfd=False)
    return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# --------------------------------------------------------------------------------------------------------------------
# The memory that this process may still take: the machine's, or less within a control group.


FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the files with the limit and the use, and the part of the use that can be reclaimed."""


def available_memory() -> int:
    """Return the bytes that can be taken without swapping or meeting a control group's limit."""
    import psutil  # about 10 ms, and only large parcels ask

    rooms = [_room_in(group) for group in memory.memory_groups()]
    return min([psutil.virtual_memory().available, *rooms])


def _room_in(group: MemoryGroup) -> int:
    """Return the smallest room among a group and its ancestors; folders that do not exist here are skipped."""
    limit_name, usage_name, reclaimable_name = FILES[group.version]
    room = 1 << 62
    for folder in (group.folder, *group.folder.parents):
        if folder != group.mount and group.mount not in folder.parents:
            break
        try:
            limit = int((folder / limit_name).read_text())
            used = int((folder / usage_name).read_text())
            stat = (folder / "memory.stat").read_text().split()
        except (OSError, ValueError):  # no such group here, or the limit is "max"
            continue
        reclaimable = int(dict(zip(stat[::2], stat[1::2], strict=False)).get(reclaimable_name, 0))
        room = min(room, max(0, limit - used + reclaimable))
    return room
