"""The order in which the output of different ranks arrived, which the log of each rank does not tell."""

from __future__ import annotations

import collections
import itertools
import threading

__all__ = ["MAX_PIECES", "LogOrder"]

MAX_PIECES = 5_000
"""As many as the lines that a view keeps of all logs together."""


class LogOrder:
    """The newest pieces of output of all ranks; a piece ends where another rank's output begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held by every access: the run's thread writes while other threads read."""
        self._pieces: collections.deque[tuple[int, int]] = collections.deque(maxlen=MAX_PIECES)

    def add(self, rank: int, end: int) -> None:
        """Add output of a rank, whose log now ends at this position."""
        with self._lock:
            if self._pieces and self._pieces[-1][0] == rank:
                self._pieces.pop()
            self._pieces.append((rank, end))

    def pieces(self, num_pieces: int) -> list[tuple[int, int]]:
        """Return the rank and the end of each of the newest pieces, in the order of their arrival."""
        with self._lock:
            return [*itertools.islice(reversed(self._pieces), num_pieces)][::-1]
