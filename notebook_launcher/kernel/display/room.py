"""The part of a run's output that its cell keeps: the beginning, the end, and between them some of standard error.

A browser slows down with tens of thousands of lines, and the notebook's file keeps them forever. Text that a cell
shows cannot be removed again, so the end, in which each rank has its share, is held back until the run is over, while
its newest lines are shown live.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.kernel.display.backlog import left_out_note
from notebook_launcher.kernel.display.newest import Newest
from notebook_launcher.kernel.display.text_block import num_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.kernel.display.text_block import TextBlock

__all__ = ["LIVE_LINES", "Room"]

HEAD, SPARE, TAIL = (4500, 450_000), (400, 40_000), (5000, 480_000)
"""Lines and bytes of the beginning, of standard error after it, and of the end: below 10,000 and 1 MB in all."""
BRIEF_HEAD, BRIEF_SPARE, BRIEF_TAIL = (150, 14_000), (40, 4_000), (250, 20_000)
"""The same for an agent, whose tools cut longer outputs somewhere."""
LIVE_LINES = 12
"""The newest of the lines held back, which are shown live."""


@dataclasses.dataclass(slots=True)
class _Budget:
    lines: int
    bytes: int

    def take(self, block: TextBlock, label_size: int) -> tuple[TextBlock, TextBlock]:
        """Return the lines from the beginning of a block that fit, and the rest."""
        part, _ = block.cut_after_lines(self.lines)
        if (size := part.message_size(label_size)) > self.bytes:
            part, _ = part.cut_after_size(len(part.text) * max(self.bytes, 0) // size)
        self.lines -= part.num_lines
        self.bytes -= part.message_size(label_size)
        return block.cut(len(part.text))


class Room:
    """Decides which lines of one run are shown at once, held back for the end, or left out.

    Args:
        label_size: Characters that a label adds to a line.
        where: An expression for all lines, such as `run.logs(rank)`.
        is_brief: True if an agent reads the cell.
    """

    def __init__(self, *, label_size: int, where: str, is_brief: bool = False) -> None:
        self._budgets = (BRIEF_HEAD, BRIEF_SPARE, BRIEF_TAIL) if is_brief else (HEAD, SPARE, TAIL)
        self._label_size = label_size
        self._where = where
        self.reset()

    def reset(self) -> None:
        """Start again with all the room, because the cell was cleared."""
        head, spare, tail = self._budgets
        self._head, self._spare = _Budget(*head), _Budget(*spare)
        """Room that is left for the beginning, and for standard error after the beginning."""
        self._is_full = False
        """True once a line did not fit into the beginning."""
        self._held = Newest(tail[1], lambda block: block.message_size(self._label_size), tail[0])
        """The newest lines, held back for the end."""
        self._left_out: collections.Counter[int] = collections.Counter()
        """By rank: the number of lines that the cell will not show."""

    def admit(
        self,
        start: list[TextBlock],
        left_out: collections.Counter[int],
        end: list[TextBlock],
        *,
        is_last: bool = False,
    ) -> list[TextBlock]:
        """Return the new lines that are to be shown now.

        Args:
            start: New lines.
            left_out: Number of lines by rank that were dropped after `start`.
            end: The lines that followed.
            is_last: True to hold back the launcher's own lines, too, where lines before them are held back.
        """
        shown = self._admit(start, is_last=is_last)
        self._is_full = self._is_full or bool(left_out)
        for rank in left_out:  # What is left of a rank's output has no gap.
            self._leave_out(self._held.drop_rank(rank))
        self._left_out += left_out
        return shown + self._admit(end, is_last=is_last)

    def refund(self, blocks: list[TextBlock], shown: list[str]) -> None:
        """Refund the cost of lines that are shown once for several ranks."""
        self._head.lines += sum(block.num_lines for block in blocks) - sum(text.count("\n") for text in shown)
        self._head.bytes += sum(block.message_size(self._label_size) for block in blocks) - sum(map(num_bytes, shown))

    def live(self) -> tuple[str, list[TextBlock]]:
        """Return a heading and more than enough of the newest lines held back; the heading is empty without any."""
        blocks: list[TextBlock] = []
        num_lines = 0
        for block in self._held.newest_first():
            _, newest = block.cut_before_lines(LIVE_LINES)
            blocks.append(newest)
            num_lines += newest.num_lines
            if num_lines > 8 * LIVE_LINES:
                break
        total = self._held.num_lines + self._left_out.total()
        return (f"... {total:,} more lines; the newest:" if blocks else ""), blocks[::-1]

    def drain(self) -> list[TextBlock]:
        """Return the end of the output, after a line about the lines that are left out before it."""
        note = [left_out_note(self._left_out, self._where)] if self._left_out else []
        self._left_out.clear()
        return note + self._held.drain()

    def _admit(self, blocks: Iterable[TextBlock], *, is_last: bool) -> list[TextBlock]:
        shown = []
        for block in blocks:
            rest = block
            if block.rank is None and not (is_last and self._is_full):
                shown.append(block)
                continue
            if block.rank is not None and not self._is_full:
                part, rest = self._head.take(block, self._label_size)
                shown += [part] if part.text else []
            elif block.rank is not None and block.stream == "stderr":
                part, rest = self._spare.take(block, self._label_size)
                shown += [part] if part.text else []
            if rest.text:
                self._is_full = True
                self._leave_out(self._held.push(rest))
        return shown

    def _leave_out(self, blocks: Iterable[TextBlock]) -> None:
        for block in blocks:
            assert block.rank is not None
            self._left_out[block.rank] += block.num_lines
