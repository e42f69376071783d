"""Pictures and tables in a run's folder: a file for each, and a list of them as JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from notebook_launcher.errors import RunFolderError
from notebook_launcher.history.encoding import encode, is_place
from notebook_launcher.history.folder_files import read_bytes
from notebook_launcher.history.run_files import append
from notebook_launcher.history.run_folders import PICTURES
from notebook_launcher.history.schema import RunPicture

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["MAX_PICTURE_BYTES", "PictureFiles", "read_pictures"]

MAX_PICTURE_BYTES = 32_000_000
"""Bytes of a run's pictures. The first half of the room takes all; each next half of the rest a tenth as many."""
SUFFIXES = {"image/png": "png", "image/svg+xml": "svg", "text/csv": "csv"}


class PictureFiles:
    """The pictures of one run; the fuller the room, the fewer of each name and rank it takes."""

    def __init__(self, folder: Path, limit: int = MAX_PICTURE_BYTES) -> None:
        self.size = 0
        self._folder = folder
        self._limit = limit
        self._num_written = 0
        self._seen: Counter[tuple[str, int]] = Counter()

    def write(self, pictures: Iterable[RunPicture]) -> None:
        """Add pictures; raises `OSError`."""
        for picture in pictures:
            key = (picture.name, picture.rank)
            place = self._seen[key]
            self._seen[key] += 1
            if place % self._stride() == 0 and self.size + len(picture.data) <= self._limit:
                self._write(picture)

    def _stride(self) -> int:
        stride, room = 1, 1 - self.size / self._limit
        while room < 0.5 and stride < 10**6:
            stride, room = 10 * stride, 2 * room
        return stride

    def _write(self, picture: RunPicture) -> None:
        file = f"picture-{self._num_written}.{SUFFIXES[picture.mime]}"
        fields = {"rank": picture.rank, "step": picture.step, "time": picture.time, "name": picture.name, "file": file}
        append(self._folder / file, picture.data)
        append(self._folder / PICTURES, encode(fields).encode("ascii") + b"\n")
        self._num_written += 1
        self.size += len(picture.data)


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
