"""The part of a run's output that its cell keeps: the beginning, the end, and between them some of standard error.

A browser slows down with tens of thousands of lines, and the notebook's file keeps them forever. Text that a cell
shows cannot be removed again, so the end is held back until the run is over, while its newest lines are shown live.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.kernel.display.backlog import left_out_note, num_bytes, split
from notebook_launcher.kernel.display.folding import TextBlock

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LIVE_LINES", "Room"]

HEAD, SPARE, TAIL = (4500, 450_000), (400, 40_000), (5000, 480_000)
"""Lines and bytes of the beginning, of standard error after it, and of the end: below 10,000 and 1 MB in all."""
LIVE_LINES = 12


@dataclasses.dataclass(slots=True)
class _Budget:
    lines: int
    bytes: int

    def take(self, block: TextBlock, label_size: int, *, from_end: bool = False) -> tuple[TextBlock, TextBlock]:
        """Return the lines from one end of a block that fit, and the rest."""
        part, rest = _cut(block, self.lines, from_end=from_end)
        if (cost := _cost(part, label_size)) > self.bytes:
            size = len(part.text) * max(self.bytes, 0) // cost
            part, _ = split(part, size, from_end=from_end)
            length = len(part.text)
            text = block.text[: len(block.text) - length] if from_end else block.text[length:]
            rest = dataclasses.replace(block, text=text)
        self.lines -= part.text.count("\n")
        self.bytes -= _cost(part, label_size)
        return part, rest


class Room:
    """Decides which lines of one run are shown at once, held back for the end, or left out.

    Args:
        label_size: Characters that a label adds to a line.
        where: An expression for all lines, such as `run.logs(rank)`.
    """

    def __init__(self, *, label_size: int, where: str) -> None:
        self._label_size = label_size
        self._where = where
        self.reset()

    def reset(self) -> None:
        """Start again with all the room, because the cell was cleared."""
        self._head, self._spare = _Budget(*HEAD), _Budget(*SPARE)
        """Room that is left for the beginning, and for standard error after the beginning."""
        self._is_full = False
        """True once a line did not fit into the beginning."""
        self._held: collections.deque[TextBlock] = collections.deque()
        """The newest lines, held back for the end."""
        self._held_lines = self._held_bytes = 0
        """Lines and bytes of the blocks in `_held`."""
        self._left_out: collections.Counter[int] = collections.Counter()
        """By rank: the number of lines that the cell will not show."""

    def admit(
        self, start: list[TextBlock], left_out: collections.Counter[int], end: list[TextBlock]
    ) -> list[TextBlock]:
        """Return the new lines that are to be shown now.

        Args:
            start: New lines.
            left_out: Number of lines by rank that were dropped after `start`.
            end: The lines that followed.
        """
        shown = self._admit(start)
        if left_out:
            self._is_full = True
            while self._held:
                self._drop_oldest()
            self._left_out += left_out
        return shown + self._admit(end)

    def refund(self, blocks: list[TextBlock], shown: list[str]) -> None:
        """Refund the cost of lines that are shown once for several ranks."""
        self._head.lines += sum(block.text.count("\n") for block in blocks) - sum(text.count("\n") for text in shown)
        self._head.bytes += sum(_cost(block, self._label_size) for block in blocks) - sum(map(num_bytes, shown))

    def live(self) -> tuple[str, list[TextBlock]]:
        """Return a heading and more than enough of the newest lines held back; the heading is empty without any."""
        blocks: list[TextBlock] = []
        num_lines = 0
        for block in reversed(self._held):
            part, _ = _cut(block, LIVE_LINES, from_end=True)
            blocks.append(part)
            num_lines += part.text.count("\n")
            if num_lines > 8 * LIVE_LINES:
                break
        total = self._held_lines + self._left_out.total()
        return (f"... {total:,} more lines; the newest:" if blocks else ""), blocks[::-1]

    def drain(self) -> list[TextBlock]:
        """Return the end of the output, after a line about the lines that are left out before it."""
        budget, end = _Budget(*TAIL), list[TextBlock]()
        while self._held:
            block = self._held.pop()
            part, rest = budget.take(block, self._label_size, from_end=True)
            end.append(part)
            if rest.text:
                self._leave_out(rest)
                break
        while self._held:
            self._drop_oldest()
        note = [left_out_note(self._left_out, self._where)] if self._left_out else []
        self._held_lines = self._held_bytes = 0
        self._left_out.clear()
        return note + [block for block in reversed(end) if block.text]

    def _admit(self, blocks: Iterable[TextBlock]) -> list[TextBlock]:
        shown = []
        for block in blocks:
            rest = block
            if block.rank is None:
                shown.append(block)
                continue
            if not self._is_full:
                part, rest = self._head.take(block, self._label_size)
                shown += [part] if part.text else []
            elif block.stream == "stderr":
                part, rest = self._spare.take(block, self._label_size)
                shown += [part] if part.text else []
            if rest.text:
                self._is_full = True
                self._hold(rest)
        return shown

    def _hold(self, block: TextBlock) -> None:
        self._held.append(block)
        self._count(block, 1)
        while True:
            oldest = self._held[0]
            lines = self._held_lines - oldest.text.count("\n")
            if lines < TAIL[0] and self._held_bytes - _cost(oldest, self._label_size) < TAIL[1]:
                break
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._held.popleft()
        self._count(oldest, -1)
        self._leave_out(oldest)

    def _count(self, block: TextBlock, sign: int) -> None:
        self._held_lines += sign * block.text.count("\n")
        self._held_bytes += sign * _cost(block, self._label_size)

    def _leave_out(self, block: TextBlock) -> None:
        assert block.rank is not None
        self._left_out[block.rank] += block.text.count("\n")


def _cost(block: TextBlock, label_size: int) -> int:
    return num_bytes(block.text) + label_size * block.text.count("\n")


def _cut(block: TextBlock, num_lines: int, *, from_end: bool) -> tuple[TextBlock, TextBlock]:
    """Return some lines from one end of a block, and the rest."""
    if block.text.count("\n") <= num_lines:
        return block, dataclasses.replace(block, text="")
    if num_lines <= 0:
        return dataclasses.replace(block, text=""), block
    if from_end:
        place = len(block.text[:-1].rsplit("\n", num_lines)[0]) + 1
        return dataclasses.replace(block, text=block.text[place:]), dataclasses.replace(block, text=block.text[:place])
    place = len(block.text) - len(block.text.split("\n", num_lines)[num_lines])
    return dataclasses.replace(block, text=block.text[:place]), dataclasses.replace(block, text=block.text[place:])
