"""Growing files in a run's folder: metrics as JSON lines, and the output of each rank.

Each write opens the file again, because processes that the user forks would inherit an open descriptor. Both files
have a limit, so that a run of any length and noise takes a bounded part of the disk.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from typing import TYPE_CHECKING

from notebook_launcher.history.encoding import encode_point
from notebook_launcher.history.run_folders import METRICS, log_name
from notebook_launcher.wording.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from notebook_launcher.history.schema import MetricPoint, RunReader

__all__ = ["MAX_LOG_BYTES", "MAX_METRICS_BYTES", "LogFile", "MetricsFile", "append", "replace"]

MAX_METRICS_BYTES = 64_000_000
"""About 700,000 points of one metric."""
MAX_LOG_BYTES = 64_000_000
"""Bytes of the logs of all ranks together. Each rank gets an equal part, but at least `MIN_LOG_BYTES`."""
MIN_LOG_BYTES = 1_000_000
TAIL_BYTES = 65_536
"""Bytes of the end of a log that did not fit; they are written when the run is over."""
CHUNK = 1000


class MetricsFile:
    """File of a run's points; the fuller it is, the fewer points it takes.

    The first half of the room takes every point. Each next half of the remaining room takes a tenth as many, of each
    rank and each set of metrics in turn, so that every curve reaches the end of the run.
    """

    def __init__(self, folder: Path, limit: int = MAX_METRICS_BYTES) -> None:
        self.size = 0
        self.num_left_out = 0
        self._path = folder / METRICS
        self._limit = limit
        self._seen: Counter[tuple[int, tuple[str, ...]]] = Counter()

    def write(self, points: Iterable[MetricPoint]) -> None:
        """Append points; raises `OSError`."""
        remaining = iter(points)
        while chunk := list(itertools.islice(remaining, CHUNK)):
            lines = self._fitting(encode_point(point) + "\n" for point in self._thinned(chunk, self._stride()))
            self.num_left_out += len(chunk) - len(lines)
            if lines:
                data = "".join(lines).encode("ascii")
                append(self._path, data)
                self.size += len(data)

    def _fitting(self, lines: Iterable[str]) -> list[str]:
        fitting, room = [], self._limit - self.size
        for line in lines:
            if len(line) <= room:  # All is ASCII, so characters are bytes.
                fitting.append(line)
                room -= len(line)
        return fitting

    def _stride(self) -> int:
        room = 1 - self.size / self._limit
        return 10 ** min(9, int(-math.log2(room))) if room > 0 else 10**9

    def _thinned(self, points: list[MetricPoint], stride: int) -> list[MetricPoint]:
        if stride == 1:
            return points
        kept = []
        for point in points:
            key = (point.rank, tuple(point.values))
            if self._seen[key] % stride == 0:
                kept.append(point)
            self._seen[key] += 1
        return kept


class LogFile:
    """File with one rank's output: the beginning, and the end if the output is too long; no file without output."""

    def __init__(self, folder: Path, rank: int, num_processes: int, limit: int = MAX_LOG_BYTES) -> None:
        self._path = folder / log_name(rank)
        self._rank = rank
        self._limit = max(min(MIN_LOG_BYTES, limit), limit // num_processes)
        self._position = 0
        self._is_full = False

    @property
    def size(self) -> int:
        """Bytes that were written to the file."""
        return self._position

    def write(self, reader: RunReader) -> None:
        """Append the rank's new output; raises `OSError`."""
        if self._is_full:
            return
        text, end = reader.logs_since(self._rank, self._position)
        if not text:
            return
        data = text.encode("utf-8", "replace")[: self._limit - self._position]
        append(self._path, data)
        self._is_full = end > self._limit
        self._position = self._limit if self._is_full else end

    def finish(self, reader: RunReader) -> None:
        """Append the end of output that did not fit; raises `OSError`."""
        self.write(reader)
        if not self._is_full:
            return
        _, end = reader.logs_since(self._rank, 1 << 62)
        start = max(self._position, end - TAIL_BYTES)
        text, _ = reader.logs_since(self._rank, start)
        note = f"\n[{format_bytes(start - self._position)} not recorded here]\n" if start > self._position else ""
        append(self._path, (note + text).encode("utf-8", "replace"))


def append(path: Path, data: bytes) -> None:
    """Write at the end of a file, which is made if it does not exist; raises `OSError`."""
    _write(path, data, os.O_APPEND)


def replace(path: Path, data: bytes, part: Path) -> None:
    """Write a file under another name and rename it, so that readers see either version whole; raises `OSError`."""
    _write(part, data, os.O_TRUNC)
    part.replace(path)


def _write(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | mode, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
