"""Growing files in a run's folder: metrics as JSON lines, and the output of each rank.

Each write opens the folder and the file again, because processes that the user forks would inherit an open descriptor;
and the folder must still be the user's own, for the owner of the folder of all runs can put another in its place. Both
files have a limit, so that a run of any length and noise takes a bounded part of the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import Counter
from typing import TYPE_CHECKING

from notebook_launcher.errors import RunFolderError
from notebook_launcher.history.encoding import encode, encode_point, is_place
from notebook_launcher.history.folder_files import open_file, opened, read_bytes
from notebook_launcher.history.run_folders import LOG_ORDER, METRICS, PICTURES, log_name
from notebook_launcher.history.schema import RunPicture
from notebook_launcher.wording import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from notebook_launcher.history.schema import MetricPoint, RunReader


MAX_METRICS_BYTES = 64_000_000
"""About 700,000 points of one metric."""
MAX_LOG_BYTES = 64_000_000
"""Bytes of the logs of all ranks together. Each rank gets an equal part, but at least `MIN_LOG_BYTES`."""
MIN_LOG_BYTES = 1_000_000
TAIL_BYTES = 65_536
"""Bytes of the end of a log that did not fit; they are written when the run is over."""


class _Room:
    """The bytes that a run's files of one kind may take; the fuller, the fewer entries fit.

    The first half of the room takes every entry. Each next half of the remaining room takes a tenth as many, of each
    key in turn, so that every curve reaches the end of the run.
    """

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._seen: Counter[object] = Counter()

    def takes(self, key: object, size: int) -> bool:
        """Take an entry of so many bytes, or return False."""
        place, room = self._seen[key], 1 - self.size / self._limit
        self._seen[key] += 1
        is_in_turn = room > 0 and place % 10 ** min(9, int(-math.log2(room))) == 0
        fits = is_in_turn and self.size + size <= self._limit
        self.size += size * fits
        return fits


class MetricsFile(_Room):
    """File of a run's points: the longer the run, the fewer of each rank and each set of metrics."""

    def __init__(self, folder: Path, limit: int = MAX_METRICS_BYTES) -> None:
        super().__init__(limit)
        self.num_left_out = 0
        self._path = folder / METRICS

    def write(self, points: Iterable[MetricPoint]) -> None:
        """Append points; raises `OSError`."""
        lines = []
        for point in points:
            line = encode_point(point) + "\n"
            if self.takes((point.rank, *point.values), len(line)):  # All is ASCII, so characters are bytes.
                lines.append(line)
            else:
                self.num_left_out += 1
        if lines:
            append(self._path, "".join(lines).encode("ascii"))


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
    with opened(path.parent) as at:
        _write(at, path.name, data, os.O_APPEND)


def replace(path: Path, data: bytes, part: Path) -> None:
    """Write a file under another name and rename it, so that readers see either version whole; raises `OSError`."""
    with opened(path.parent) as at:
        try:
            _write(at, part.name, data, os.O_TRUNC)
            os.replace(part.name, path.name, src_dir_fd=at, dst_dir_fd=at)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part.name, dir_fd=at)  # On a full disk another file has use for the room.
            raise


def open_new(folder: Path, name: str) -> int:
    """Return a descriptor for writing a file from its beginning; raises `OSError`."""
    with opened(folder) as at:
        return _open(at, name, os.O_TRUNC)


def _write(at: int, name: str, data: bytes, mode: int) -> None:
    fd = _open(at, name, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def _open(at: int, name: str, mode: int) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | mode, 0o600, dir_fd=at)


# --------------------------------------------------------------------------------------------------------------------
# File in a run's folder with the order in which the output of different ranks arrived.
#
# A line has a rank, and the position in its log up to which its output had arrived before the output of another rank.


MAX_BYTES = 1_000_000
"""About 70,000 changes from one rank to another; later output counts as the end of the last one."""
MAX_PIECES = 5_000
"""Pieces that are read at a time, as many as a run knows."""
MAX_LINE = 32


class LogOrderFile:
    """The file, in the process that writes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_ORDER
        self.size = 0
        self._ends: dict[int, int] = {}
        """By rank: the position up to which its output is in the file."""

    def write(self, reader: RunReader) -> None:
        """Append the pieces of output since the last call; raises `OSError`."""
        if self.size > MAX_BYTES:
            return
        news = [(rank, end) for rank, end in reader.log_order(MAX_PIECES) if end > self._ends.get(rank, 0)]
        if not news:
            return
        data = "".join(f"{rank} {end}\n" for rank, end in news).encode("ascii")
        append(self._path, data)
        self._ends.update(news)
        self.size += len(data)


def read_log_order(folder: Path, num_pieces: int) -> list[tuple[int, int]]:
    """Return the rank and the end of each of the newest pieces, in the order of their arrival; [] without a file."""
    data = b""
    with contextlib.suppress(OSError), open(open_file(folder, LOG_ORDER), "rb") as file:
        start = max(0, file.seek(0, 2) - MAX_LINE * num_pieces)
        file.seek(start)
        data = file.read().partition(b"\n")[2] if start else file.read()
    pieces = []
    with contextlib.suppress(ValueError):  # Another program changed the file.
        pieces = [(int(rank), int(end)) for rank, end in map(bytes.split, data.splitlines())]
    # A piece that grew between two writes has several lines.
    merged = [list(same)[-1] for _, same in itertools.groupby(pieces, key=lambda piece: piece[0])]
    return merged[-num_pieces:]


# --------------------------------------------------------------------------------------------------------------------
# Pictures and tables in a run's folder: a file for each, and a list of them as JSON lines.


MAX_PICTURE_BYTES = 32_000_000
SUFFIXES = {"image/png": "png", "image/svg+xml": "svg", "text/csv": "csv"}


class PictureFiles(_Room):
    """The pictures of one run: the more there are, the fewer of each name and rank."""

    def __init__(self, folder: Path, limit: int = MAX_PICTURE_BYTES) -> None:
        super().__init__(limit)
        self._folder = folder
        self._num_written = 0

    def write(self, pictures: Iterable[RunPicture]) -> None:
        """Add pictures; raises `OSError`."""
        for picture in pictures:
            if self.takes((picture.name, picture.rank), len(picture.data)):
                self._write(picture)

    def _write(self, picture: RunPicture) -> None:
        file = f"picture-{self._num_written}.{SUFFIXES[picture.mime]}"
        fields = {"rank": picture.rank, "step": picture.step, "time": picture.time, "name": picture.name, "file": file}
        append(self._folder / file, picture.data)
        append(self._folder / PICTURES, encode(fields).encode("ascii") + b"\n")
        self._num_written += 1


def read_pictures(folder: Path, start: int = 0) -> list[RunPicture]:
    """Return the pictures in a run's folder, from a position on; what was removed is left out.

    Raises:
        RunFolderError: The list names more than any run writes.
    """
    pictures, size = [], 0
    for line in read_bytes(folder, PICTURES).splitlines()[start:]:
        if (picture := _read(folder, line)) is not None:
            pictures.append(picture)
            size += len(picture.data)
        if size > MAX_PICTURE_BYTES:  # Many lines may name one file.
            raise RunFolderError(f"{folder / PICTURES} names more than {MAX_PICTURE_BYTES:,} bytes of pictures.")
    return pictures


def _read(folder: Path, line: bytes) -> RunPicture | None:
    try:
        fields = json.loads(line)
        file, rank, step = str(fields["file"]), int(fields["rank"]), int(fields["step"])
        mime = next(mime for mime, suffix in SUFFIXES.items() if file.endswith(suffix))
        if "/" in file or not is_place(rank, step):  # Another program changed the list.
            return None
        if not (data := read_bytes(folder, file)):
            return None
        return RunPicture(
            rank=rank, step=step, time=float(fields["time"]), name=str(fields["name"]), mime=mime, data=data
        )
    except (OSError, ValueError, TypeError, KeyError, OverflowError, StopIteration, RecursionError):
        return None
