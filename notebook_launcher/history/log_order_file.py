"""File in a run's folder with the order in which the output of different ranks arrived.

A line has a rank, and the position in its log up to which its output had arrived before the output of another rank.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

from notebook_launcher.history.folder_files import open_file
from notebook_launcher.history.run_files import append
from notebook_launcher.history.run_folders import LOG_ORDER

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.history.schema import RunReader

__all__ = ["LogOrderFile", "read_log_order"]

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
        """Bytes that were written to the file."""
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
