"""The lines that wait for the next tick: bounded, and thinned in the middle when there are too many.

The start and the end of a flood of lines are kept, because they show what began and how far it is. Whole blocks are
dropped unread, because a million lines must not cost a million steps.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from notebook_launcher.kernel.display.newest import Newest
from notebook_launcher.kernel.display.text_block import TextBlock
from notebook_launcher.wording.counts import plural, rank_list

if TYPE_CHECKING:
    from notebook_launcher.engines.events import Stream

__all__ = ["Backlog", "left_out_note"]

HALF = 500_000
"""Characters of one tick that are kept at the start, and as many at the end."""


def left_out_note(left_out: collections.Counter[int], where: str, stream: Stream = "stdout") -> TextBlock:
    """Return the line that replaces lines that are left out.

    Args:
        left_out: Number of lines by rank.
        where: An expression for all lines, such as `run.logs(rank)`.
        stream: The stream of the note.
    """
    total = left_out.total()
    return TextBlock(
        None, stream, f"... {plural(total, 'line')} of {rank_list(left_out)} left out here; {where} has all ...\n"
    )


class Backlog:
    """Lines of all ranks in the order of their arrival."""

    def __init__(self, *, label_size: int) -> None:
        self._label_size = label_size
        """Characters that a label adds to a line."""
        self._reset()

    def _reset(self) -> None:
        self.ranks: set[int | None] = set()
        """The ranks with waiting lines; None stands for the launcher."""
        self._start: list[TextBlock] = []
        """The first blocks, up to HALF characters."""
        self._end = Newest(HALF, lambda block: len(block.text))
        """The last blocks, up to HALF characters, and the launcher's own lines between them."""
        self._start_size = 0
        """Characters of the blocks in `_start`."""
        self._left_out: collections.Counter[int] = collections.Counter()
        """By rank: the number of lines that were dropped between `_start` and `_end`."""

    def __bool__(self) -> bool:
        return bool(self._start)

    def push(self, block: TextBlock) -> None:
        """Add a block."""
        self.ranks.add(block.rank)
        if not self._end and self._start_size < HALF:
            self._start.append(block)
            self._start_size += len(block.text)
            return
        for dropped in self._end.push(block):
            self._leave_out(dropped)

    def drain_parts(self) -> tuple[list[TextBlock], collections.Counter[int], list[TextBlock]]:
        """Return and forget the first lines, the number of lines left out after them by rank, and the last lines."""
        parts = self._start, self._left_out, self._end.drain()
        self._reset()
        return parts

    def drain(self, allowance: float) -> list[TextBlock]:
        """Return and forget the lines, thinned to about `allowance` bytes."""
        blocks = [*self._start, *self._end.drain()]
        start, end = blocks, list[TextBlock]()
        if self._left_out or sum(map(self._cost, blocks)) > allowance:
            start, newest = self._fit(blocks, allowance / 2), Newest(allowance / 2, self._cost)
            for block in blocks:
                for dropped in newest.push(block):
                    self._leave_out(dropped)
            end = newest.drain()
            start.append(left_out_note(self._left_out, "run.logs(rank)", start[-1].stream if start else "stdout"))
        self._reset()
        return start + end

    def _cost(self, block: TextBlock) -> int:
        return block.message_size(self._label_size)

    def _fit(self, blocks: list[TextBlock], allowance: float) -> list[TextBlock]:
        """Move blocks from the start of the list into the result, and a part of the block that no longer fits."""
        taken: list[TextBlock] = []
        while blocks and allowance > 0:
            cost = self._cost(blocks[0])
            if cost > allowance:
                size = int(len(blocks[0].text) * allowance / cost)
                piece, blocks[0] = blocks[0].cut_after_size(size)
                taken += [piece] if piece.text else []
                break
            allowance -= cost
            taken.append(blocks.pop(0))
        return taken

    def _leave_out(self, block: TextBlock) -> None:
        assert block.rank is not None
        self._left_out[block.rank] += block.num_lines
