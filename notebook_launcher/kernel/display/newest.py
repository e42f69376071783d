"""The newest lines of all ranks within a limit, to which each rank has a share: no flood of one takes another's end."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.kernel.display.text_block import TextBlock

__all__ = ["Newest"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    order: int
    block: TextBlock
    lines: int
    size: int


@dataclasses.dataclass(slots=True)
class _Total:
    lines: int = 0
    size: int = 0

    def add(self, held: _Held, sign: int) -> None:
        self.lines += sign * held.lines
        self.size += sign * held.size


class Newest:
    """Blocks in the order of their arrival, of which the oldest of a rank with more than its share go first.

    The launcher's own lines cost nothing and stay.

    Args:
        max_size: Limit of all sizes together.
        size_of: Returns the size of a block.
        max_lines: Limit of all lines together.
    """

    def __init__(self, max_size: float, size_of: Callable[[TextBlock], int], max_lines: float = math.inf) -> None:
        self._limits = {"size": max_size, "lines": max_lines}
        self._size_of = size_of
        self._order = 0
        """Number of blocks that have arrived."""
        self._held: dict[int | None, collections.deque[_Held]] = {}
        self._by_rank: dict[int | None, _Total] = {}
        self._total = _Total()

    def __bool__(self) -> bool:
        return any(self._held.values())

    @property
    def num_lines(self) -> int:
        """Number of lines of the ranks."""
        return self._total.lines

    def push(self, block: TextBlock) -> list[TextBlock]:
        """Add a block; return the blocks, or parts of blocks, that make room for it."""
        self._order += 1
        self._add(block.rank, self._measure(self._order, block))
        dropped = []
        for kind, limit in self._limits.items():
            while (excess := getattr(self._total, kind) - limit) > 0:
                rank = self._over_its_share(block.rank, kind)
                dropped.append(self._drop(rank, kind, excess))
        return dropped

    def drop_rank(self, rank: int) -> list[TextBlock]:
        """Remove and return all blocks of a rank."""
        dropped = []
        for held in self._held.pop(rank, ()):
            self._total.add(held, -1)
            dropped.append(held.block)
        self._by_rank.pop(rank, None)
        return dropped

    def drain(self) -> list[TextBlock]:
        """Remove and return all blocks."""
        blocks = [held.block for held in heapq.merge(*self._held.values(), key=operator.attrgetter("order"))]
        self._held, self._by_rank, self._total = {}, {}, _Total()
        return blocks

    def newest_first(self) -> Iterator[TextBlock]:
        """Yield the blocks, the last first."""
        per_rank = map(reversed, self._held.values())
        for held in heapq.merge(*per_rank, key=operator.attrgetter("order"), reverse=True):
            yield held.block

    def _measure(self, order: int, block: TextBlock) -> _Held:
        if block.rank is None:
            return _Held(order, block, 0, 0)
        return _Held(order, block, block.num_lines, self._size_of(block))

    def _add(self, rank: int | None, held: _Held) -> None:
        self._held.setdefault(rank, collections.deque()).append(held)
        self._by_rank.setdefault(rank, _Total()).add(held, 1)
        self._total.add(held, 1)

    def _share(self, kind: str) -> float:
        return max(self._limits[kind], 0) / max(1, len(self._held.keys() - {None}))

    def _over_its_share(self, rank: int | None, kind: str) -> int | None:
        """Return a rank with more than its share: this rank, if it has, as in a flood; else the rank that has most."""
        if rank in self._by_rank and getattr(self._by_rank[rank], kind) > self._share(kind):
            return rank
        return max(self._by_rank, key=lambda other: getattr(self._by_rank[other], kind))

    def _drop(self, rank: int | None, kind: str, excess: float) -> TextBlock:
        """Remove a rank's oldest block, or lines from its beginning if that is enough."""
        blocks, total = self._held[rank], self._by_rank[rank]
        oldest = blocks.popleft()
        for amounts in (total, self._total):
            amounts.add(oldest, -1)
        amount = getattr(oldest, kind)
        needed = min(excess, getattr(total, kind) + amount - self._share(kind))
        gone, rest = _cut(oldest.block, kind, oldest.lines, max(0.0, 1 - needed / amount))
        if rest.text:
            held = self._measure(oldest.order, rest)
            blocks.appendleft(held)
            for amounts in (total, self._total):
                amounts.add(held, 1)
        elif not blocks:
            del self._held[rank], self._by_rank[rank]
        return gone


def _cut(block: TextBlock, kind: str, num_lines: int, fraction: float) -> tuple[TextBlock, TextBlock]:
    """Cut a block between two lines, so that at most this part of its text or of its lines is in the second piece."""
    if kind == "size":
        return block.cut_before_size(int(len(block.text) * fraction))
    return block.cut_before_lines(min(int(num_lines * fraction + 1e-6), num_lines - 1))
