"""A run's folder while the run writes to it: its growing files, its summary and its reserve.

The recorder decides when something is written, and what an error of writing means.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from notebook_launcher.history import owners, run_folders
from notebook_launcher.history.encoding import encode, encode_snapshot
from notebook_launcher.history.log_order_file import LogOrderFile
from notebook_launcher.history.picture_files import PictureFiles
from notebook_launcher.history.run_files import LogFile, MetricsFile, append, replace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from notebook_launcher.history.schema import RunReader, RunSnapshot
    from notebook_launcher.kernel.calls.origin import Origin

__all__ = ["FORMAT", "OpenFolder"]

FORMAT = 1
"""The layout of the folder; readers ignore what they do not know."""
RESERVED = 262_144
"""Bytes of the reserve: a summary has 160 kB at most, a detached run's ending a few."""


class OpenFolder:
    """The files of one run's folder. Every method that writes raises `OSError`.

    Args:
        path: The folder, which exists and is empty.
        reader: The run.
        num_processes: Number of ranks.
    """

    def __init__(self, path: Path, reader: RunReader, num_processes: int) -> None:
        self.path = path
        """The folder."""
        self._reader = reader
        self._late: Origin | None = None
        """The origin of the run until all of its files are written."""
        self._metrics = MetricsFile(path)
        self._position = 0
        """The read position in the run's metrics."""
        self._pictures = PictureFiles(path)
        self._num_pictures = 0
        """The read position in the run's pictures."""
        self._logs = [LogFile(path, rank, num_processes) for rank in range(num_processes)]
        self._log_order = LogOrderFile(path) if num_processes > 1 else None
        self._has_reserve = False

    @property
    def size(self) -> int:
        """Bytes of the files that grow."""
        order = 0 if self._log_order is None else self._log_order.size
        return self._metrics.size + self._pictures.size + sum(log.size for log in self._logs) + order

    def write_origin(self, snapshot: RunSnapshot, origin: Callable[[Path], Origin] | None) -> None:
        """Write the options, and the files of the run's origin that are there at once."""
        settings = {**snapshot.config, "arguments": snapshot.arguments}
        append(self.path / run_folders.CONFIG, encode(settings).encode("ascii"))
        if origin is not None:
            self._late = origin(self.path)
            for name, text in self._late.files.items():
                append(self.path / name, text.encode("utf-8", "backslashreplace"))

    def write_late(self, *, wait: bool) -> None:
        """Write the files of the run's origin that take some time, once they are there, or with `wait` now."""
        files = None if self._late is None else self._late.later(wait=wait)
        if files is None:
            return
        self._late = None
        for name, text in files.items():
            replace(self.path / name, text.encode("utf-8", "backslashreplace"), self.path / run_folders.PART)

    def write_news(self) -> None:
        """Append what the ranks wrote and reported since the last call."""
        pictures, self._num_pictures = self._reader.pictures_since(self._num_pictures)
        self._pictures.write(pictures)
        points, self._position = self._reader.metrics_since(self._position)
        self._metrics.write(points)
        for log in self._logs:
            log.write(self._reader)
        if self._log_order is not None:
            self._log_order.write(self._reader)

    def write_end(self, snapshot: RunSnapshot) -> None:
        """Write the rest of what the ranks wrote and reported, and the last summary."""
        self.write_news()
        for log in self._logs:
            log.finish(self._reader)
        self.write_summary(snapshot)

    def write_summary(self, snapshot: RunSnapshot) -> None:
        """Replace the summary as a whole."""
        more = {"format": FORMAT, "kernel": owners.identify(), "metrics_left_out": self._metrics.num_left_out}
        data = encode({**encode_snapshot(snapshot), **more}).encode("ascii")
        replace(self.path / run_folders.SUMMARY, data, self.path / run_folders.PART)

    def reserve_room(self) -> None:
        """Reserve room for the run's last state, if the disk has that much; idempotent, and raises nothing."""
        if self._has_reserve:
            return
        self._has_reserve = True
        with contextlib.suppress(OSError):
            fd = os.open(self.path / run_folders.RESERVE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, RESERVED)
            finally:
                os.close(fd)

    def release_room(self) -> None:
        """Release the room that was reserved; raises nothing."""
        if self._has_reserve:
            with contextlib.suppress(OSError):
                (self.path / run_folders.RESERVE).unlink()
