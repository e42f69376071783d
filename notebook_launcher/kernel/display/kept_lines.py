"""`TextBlock`: whole lines that one rank wrote at once, its size, and the ways to cut it between two lines."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import json
import math
import operator
import os
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING

from notebook_launcher.wording import plural, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from notebook_launcher.engines.engine import Stream


def num_bytes(text: str) -> int:
    """Return the size of a text in a Jupyter message: a newline takes two bytes, and an escape six."""
    return len(json.dumps(text, ensure_ascii=False).encode())


@dataclasses.dataclass(frozen=True, slots=True)
class TextBlock:
    """Whole lines that one rank wrote at once."""

    rank: int | None
    """The rank; None for the launcher's own lines."""
    stream: Stream
    text: str
    """The lines; each ends with a newline."""

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return self.text.count("\n")

    def message_size(self, label_size: int) -> int:
        """Return the bytes that the block takes in a message, where each line has a label of this size."""
        return num_bytes(self.text) + label_size * self.num_lines

    def cut(self, place: int) -> tuple[TextBlock, TextBlock]:
        """Return the lines before a place in the text, and the lines after it."""
        return (
            TextBlock(self.rank, self.stream, self.text[:place]),
            TextBlock(self.rank, self.stream, self.text[place:]),
        )

    def cut_before_size(self, size: int) -> tuple[TextBlock, TextBlock]:
        """Return the rest, and the last lines, of at most `size` characters."""
        if size >= len(self.text):
            return self.cut(0)
        return self.cut(self.text.find("\n", len(self.text) - size - 1) + 1)

    def cut_after_lines(self, num_lines: int) -> tuple[TextBlock, TextBlock]:
        """Return the first lines, at most so many, and the rest."""
        if self.num_lines <= num_lines:
            return self.cut(len(self.text))
        rest = self.text.split("\n", max(num_lines, 0))[-1]
        return self.cut(len(self.text) - len(rest))

    def cut_before_lines(self, num_lines: int) -> tuple[TextBlock, TextBlock]:
        """Return the rest, and the last lines, at most so many."""
        if self.num_lines <= num_lines:
            return self.cut(0)
        rest = self.text[:-1].rsplit("\n", max(num_lines, 0))[0]
        return self.cut(len(rest) + 1)


# --------------------------------------------------------------------------------------------------------------------
# The lines that wait for the next tick: bounded, and thinned in the middle when there are too many.
#
# The start and the end of a flood of lines are kept, because they show what began and how far it is. Whole blocks are
# dropped unread, because a million lines must not cost a million steps.


HALF = 500_000
"""Characters of one tick that are kept at the start, and as many at the end."""


def left_out_note(left_out: collections.Counter[int], where: str) -> TextBlock:
    """Return the line that replaces lines that are left out, counted by rank; `where` is an expression for them all."""
    lines = plural(left_out.total(), "line")
    return TextBlock(None, "stdout", f"... {lines} of {rank_list(left_out)} left out here; {where} has all ...\n")


def count(left_out: collections.Counter[int], blocks: Iterable[TextBlock]) -> None:
    """Add the lines of blocks that are left out."""
    for block in blocks:
        assert block.rank is not None
        left_out[block.rank] += block.num_lines


class Backlog:
    """Lines of all ranks in the order of their arrival."""

    def __init__(self) -> None:
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
        self._left_out = collections.Counter[int]()
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
        count(self._left_out, self._end.push(block))

    def drain_parts(self) -> tuple[list[TextBlock], collections.Counter[int], list[TextBlock]]:
        """Return and forget the first lines, the number of lines left out after them by rank, and the last lines."""
        parts = self._start, self._left_out, self._end.drain()
        self._reset()
        return parts

    def drain(self) -> list[TextBlock]:
        """Return and forget the lines, with a line in the place of those that were dropped."""
        start, left_out, end = self.drain_parts()
        return [*start, *([left_out_note(left_out, "run.logs(rank)")] if left_out else []), *end]


# --------------------------------------------------------------------------------------------------------------------
# The newest lines of all ranks within a limit, to which each rank has a share: no flood of one takes another's end.


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


# --------------------------------------------------------------------------------------------------------------------
# The part of a run's output that its cell keeps: the beginning, the end, and between them some of standard error.
#
# A browser slows down with tens of thousands of lines, and the notebook's file keeps them forever. Text that a cell
# shows cannot be removed again, so the end, in which each rank has its share, is held back until the run is over,
# while its newest lines are shown live.


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
            most = len(part.text) * max(self.bytes, 0) // size
            part, _ = part.cut(part.text.rfind("\n", 0, most) + 1)
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
            count(self._left_out, self._held.drop_rank(rank))
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
                count(self._left_out, self._held.push(rest))
        return shown


# --------------------------------------------------------------------------------------------------------------------
# The whole output of one rank, stored so that a long run does not fill the kernel's memory.
#
# The text is collected in memory and moved to an unnamed temporary file a megabyte at a time, which takes few system
# calls and leaves nothing to remove. If there is no writable temporary folder, or the disk is full, the rest stays in
# memory, because a run must not fail because of its log.


SPOOL_LIMIT = 1 << 20
"""Bytes held in memory before they move to the file."""
BLOCK = 1 << 16
"""Bytes of the file that are read at once, from its end on, in the search for the last lines."""


class RankLog:
    """The output of one rank, standard output and error in the order in which they arrived."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held by every access: the run's thread writes while other threads read."""
        self._memory = bytearray()
        """The end of the log."""
        self._fd = -1
        """Descriptor of the temporary file; -1 before the first spill."""
        self._in_file = 0
        """Bytes in the file, which come before those in memory."""
        self._can_spill = True
        """False once a write to the file has failed."""

    def write(self, text: str) -> int:
        """Add text; return the position of its end."""
        with self._lock:
            self._memory += text.encode("utf-8", "replace")
            if len(self._memory) > SPOOL_LIMIT and self._can_spill:
                self._spill()
            return self._in_file + len(self._memory)

    @property
    def is_written(self) -> bool:
        """True once there is any text."""
        return bool(self._in_file or self._memory)

    def text(self) -> str:
        """Return all of it, as it was printed."""
        with self._lock:
            return self._read(0).decode("utf-8", "replace")

    def since(self, position: int) -> tuple[str, int]:
        """Return what was written after a position, in bytes, and the next position."""
        with self._lock:
            end = self._in_file + len(self._memory)
            if position >= end:
                return "", end
            data = self._read(position) if position < self._in_file else bytes(self._memory[position - self._in_file :])
        return data.decode("utf-8", "replace"), end

    def tail(self, num_lines: int) -> tuple[str, ...]:
        """Return the last lines; of a line that was overwritten (a progress bar), its last state."""
        with self._lock:
            # A view asks several times a second: only the end is copied and decoded.
            cut = len(self._memory)
            for _ in range(num_lines + 1):
                cut = max(0, self._memory.rfind(b"\n", 0, cut))
            start, data = self._in_file, bytes(self._memory[cut:])
            while not cut and start and data.count(b"\n") <= num_lines:
                start = max(0, start - BLOCK)
                data = self._read(start)
        lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
        if lines == [""] or num_lines <= 0:
            return ()
        return tuple(line.rstrip("\r").rpartition("\r")[2] for line in lines[-num_lines:])

    def _read(self, start: int) -> bytes:
        blocks = []
        while start < self._in_file:
            block = os.pread(self._fd, self._in_file - start, start)
            if not block:
                break
            blocks.append(block)
            start += len(block)
        return b"".join([*blocks, self._memory])

    def _spill(self) -> None:
        try:
            if self._fd < 0:
                file = tempfile.TemporaryFile(prefix="notebook-launcher-log-", buffering=0)  # noqa: SIM115
                self._fd = file.fileno()
                weakref.finalize(self, file.close)
            written = 0
            while written < len(self._memory):
                written += os.pwrite(self._fd, memoryview(self._memory)[written:], self._in_file + written)
        except OSError:
            self._can_spill = False
            return
        self._in_file += written
        self._memory = bytearray()


# --------------------------------------------------------------------------------------------------------------------
# The order in which the output of different ranks arrived, which the log of each rank does not tell.


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
