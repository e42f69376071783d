"""The whole output of one rank, stored so that a long run does not fill the kernel's memory.

The text is collected in memory and moved to an unnamed temporary file a megabyte at a time, which takes few system
calls and leaves nothing to remove. If there is no writable temporary folder, or the disk is full, the rest stays in
memory, because a run must not fail because of its log.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref

__all__ = ["RankLog"]

SPOOL_LIMIT = 1 << 20
"""Bytes held in memory before they move to the file."""
BLOCK = 1 << 16
"""Bytes of the file that are read at once, from its end on, in the search for the last lines."""


class RankLog:
    """The output of one rank, standard output and error in the order in which they arrived."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held by every access: the run's thread writes while other threads read."""
        self._memory = bytearray()
        """The end of the log."""
        self._fd = -1
        """Descriptor of the temporary file; -1 before the first spill."""
        self._in_file = 0
        """Bytes in the file, which come before those in memory."""
        self._can_spill = True
        """False once a write to the file has failed."""

    def write(self, text: str) -> int:
        """Add text; return the position of its end."""
        with self._lock:
            self._memory += text.encode("utf-8", "replace")
            if len(self._memory) > SPOOL_LIMIT and self._can_spill:
                self._spill()
            return self._in_file + len(self._memory)

    @property
    def is_written(self) -> bool:
        """True once there is any text."""
        return bool(self._in_file or self._memory)

    def text(self) -> str:
        """Return all of it, as it was printed."""
        with self._lock:
            return self._read(0).decode("utf-8", "replace")

    def since(self, position: int) -> tuple[str, int]:
        """Return what was written after a position, in bytes, and the next position."""
        with self._lock:
            end = self._in_file + len(self._memory)
            if position >= end:
                return "", end
            data = self._read(position) if position < self._in_file else bytes(self._memory[position - self._in_file :])
        return data.decode("utf-8", "replace"), end

    def tail(self, num_lines: int) -> tuple[str, ...]:
        """Return the last lines; of a line that was overwritten (a progress bar), its last state."""
        with self._lock:
            # A view asks several times a second: only the end is copied and decoded.
            cut = len(self._memory)
            for _ in range(num_lines + 1):
                cut = max(0, self._memory.rfind(b"\n", 0, cut))
            start, data = self._in_file, bytes(self._memory[cut:])
            while not cut and start and data.count(b"\n") <= num_lines:
                start = max(0, start - BLOCK)
                data = self._read(start)
        lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
        if lines == [""] or num_lines <= 0:
            return ()
        return tuple(line.rstrip("\r").rpartition("\r")[2] for line in lines[-num_lines:])

    def _read(self, start: int) -> bytes:
        blocks = []
        while start < self._in_file:
            block = os.pread(self._fd, self._in_file - start, start)
            if not block:
                break
            blocks.append(block)
            start += len(block)
        return b"".join([*blocks, self._memory])

    def _spill(self) -> None:
        try:
            if self._fd < 0:
                file = tempfile.TemporaryFile(prefix="notebook-launcher-log-", buffering=0)  # noqa: SIM115
                self._fd = file.fileno()
                weakref.finalize(self, file.close)
            written = 0
            while written < len(self._memory):
                written += os.pwrite(self._fd, memoryview(self._memory)[written:], self._in_file + written)
        except OSError:
            self._can_spill = False
            return
        self._in_file += written
        self._memory = bytearray()
