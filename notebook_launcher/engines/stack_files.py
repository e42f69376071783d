"""The files into which the ranks of this machine write their stacks, at a signal, as `faulthandler` writes them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from notebook_launcher.engines.rank_pipes import RankPipes

__all__ = ["StackFiles"]

QUIET = 0.02
"""Seconds without growth after which a dump of stacks counts as complete."""
BUDGET = 0.5
"""Longest wait in seconds for the ranks' stacks."""


class StackFiles:
    """The files of stacks of a process tree's ranks (`RankStacks` of one machine).

    Args:
        pipes: The kernel's ends of each rank, which the tree replaces when it starts a rank again.
        signal: Sends a signal to ranks.
    """

    def __init__(self, pipes: Mapping[int, RankPipes], signal: Callable[[tuple[int, ...], int], None]) -> None:
        self._pipes = pipes
        self._signal = signal

    def dump(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the stacks of all threads of these ranks, or of every live rank.

        There is no sign that a dump is complete, so it is read once it has not grown for QUIET seconds.
        """
        wanted = None if ranks is None else set(ranks)
        starts = {rank: size for rank, size in self.sizes().items() if wanted is None or rank in wanted}
        fds = {rank: self._fd(rank) for rank in starts}
        self._signal(tuple(starts), messages.DUMP_SIGNAL)
        sizes, changed, began = dict(starts), time.monotonic(), time.monotonic()
        while True:
            time.sleep(QUIET / 4)
            now = time.monotonic()
            new = {rank: self._size(rank) for rank in starts}
            if new != sizes:
                sizes, changed = new, now
            answered = all(sizes[rank] > starts[rank] for rank in starts)
            if now - began > BUDGET or (answered and now - changed > QUIET):
                break
        return {rank: _read(fd, starts[rank], sizes[rank]) for rank, fd in fds.items() if fd is not None}

    def sizes(self) -> dict[int, int]:
        """Return the number of bytes that each rank that is up has written into its file."""
        up = {rank for rank, pipes in self._pipes.items() if pipes.pid is not None and pipes.stacks_fd is not None}
        return {rank: self._size(rank) for rank in sorted(up)}

    def request(self) -> None:
        """Have every rank that is up write its stacks, without waiting for them; the signal would kill others."""
        self._signal(tuple(self.sizes()), messages.DUMP_SIGNAL)

    def read(self, starts: Mapping[int, int]) -> dict[int, str]:
        """Return what ranks have written into their files after these positions."""
        fds = {rank: self._fd(rank) for rank in starts}
        return {rank: _read(fd, starts[rank], self._size(rank)) for rank, fd in fds.items() if fd is not None}

    def _fd(self, rank: int) -> int | None:
        pipes = self._pipes.get(rank)
        return None if pipes is None else pipes.stacks_fd

    def _size(self, rank: int) -> int:
        fd = self._fd(rank)
        return 0 if fd is None else os.fstat(fd).st_size


def _read(fd: int, start: int, end: int) -> str:
    return os.pread(fd, max(0, end - start), start).decode(errors="replace")
