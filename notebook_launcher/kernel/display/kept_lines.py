"""The lines of a run that its cell keeps, and the whole output of each rank."""

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
from typing import TYPE_CHECKING, NamedTuple

from notebook_launcher.wording import plural, rank_list

if TYPE_CHECKING:
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

    def cut(self, num_lines: int) -> tuple[TextBlock, TextBlock]:
        """Return the first lines, at most so many, and the rest."""
        rest = self.text.split("\n", num_lines)[-1] if 0 < num_lines < self.num_lines else ""
        place = 0 if num_lines <= 0 else len(self.text) - len(rest)
        return (
            TextBlock(self.rank, self.stream, self.text[:place]),
            TextBlock(self.rank, self.stream, self.text[place:]),
        )


# --------------------------------------------------------------------------------------------------------------------
# The newest lines of all ranks within a limit, to which each rank has a share: no flood of one takes another's end.


class _Held(NamedTuple):
    order: int
    block: TextBlock
    cost: tuple[int, int]
    """Lines and bytes; the launcher's own lines cost nothing."""


class Newest:
    """Blocks in the order of their arrival, of which the oldest of a rank with more than its share go first.

    `limits`: of all lines and of all bytes together, to which a label adds `label_size` for each line.
    """

    def __init__(self, limits: tuple[float, float], label_size: int) -> None:
        self._limits = limits
        self._label_size = label_size
        self._order = itertools.count()
        self._held: dict[int | None, collections.deque[_Held]] = {}
        self._by_rank: dict[int | None, list[int]] = {}
        """By rank: its lines and its bytes."""
        self.total = [0, 0]
        """Lines and bytes of all ranks."""

    def push(self, block: TextBlock) -> list[TextBlock]:
        """Add a block; return the blocks, or parts of blocks, that make room for it."""
        self._held.setdefault(block.rank, collections.deque()).append(self._counted(next(self._order), block))
        dropped = []
        for kind, limit in enumerate(self._limits):
            while (excess := self.total[kind] - limit) > 0:
                dropped.append(self._drop(block.rank, kind, excess))
        return dropped

    def drain(self) -> list[TextBlock]:
        """Remove and return all blocks."""
        blocks = [held.block for held in heapq.merge(*self._held.values(), key=operator.attrgetter("order"))]
        self._held, self._by_rank, self.total = {}, {}, [0, 0]
        return blocks

    def last(self, num_lines: int) -> list[TextBlock]:
        """Return the last blocks, with at least so many lines if there are as many; of each the last lines."""
        newest: list[TextBlock] = []
        per_rank = map(reversed, self._held.values())
        for held in heapq.merge(*per_rank, key=operator.attrgetter("order"), reverse=True):
            newest.append(held.block.cut(held.block.num_lines - num_lines)[1])
            if sum(block.num_lines for block in newest) > 8 * num_lines:  # Equal lines of ranks become one.
                break
        return newest[::-1]

    def _counted(self, order: int, block: TextBlock) -> _Held:
        cost = (0, 0) if block.rank is None else (block.num_lines, block.message_size(self._label_size))
        held = _Held(order, block, cost)
        self._count(held, 1)
        return held

    def _count(self, held: _Held, sign: int) -> None:
        for amounts in (self.total, self._by_rank.setdefault(held.block.rank, [0, 0])):
            for kind in (0, 1):
                amounts[kind] += sign * held.cost[kind]

    def _drop(self, rank: int | None, kind: int, excess: float) -> TextBlock:
        """Remove the oldest lines of a rank that has more than its share: this one, as in a flood, or the greatest."""
        share = max(self._limits[kind], 0) / max(1, len(self._held.keys() - {None}))
        if rank not in self._by_rank or self._by_rank[rank][kind] <= share:
            rank = max(self._by_rank, key=lambda other: self._by_rank[other][kind])
        needed = min(excess, self._by_rank[rank][kind] - share)
        oldest = self._held[rank].popleft()
        self._count(oldest, -1)
        gone, rest = oldest.block.cut(math.ceil(oldest.block.num_lines * needed / oldest.cost[kind]))
        if rest.text:
            self._held[rank].appendleft(self._counted(oldest.order, rest))
        elif not self._held[rank]:
            del self._held[rank], self._by_rank[rank]
        return gone


# --------------------------------------------------------------------------------------------------------------------
# The part of a run's output that its cell keeps: the beginning, the end, and between them some of standard error.
#
# A browser slows down with tens of thousands of lines, and the notebook's file keeps them forever. Text that a cell
# shows cannot be removed again, so the end, in which each rank has its share, is held back until the run is over,
# while its newest lines are shown live. Other outputs keep the beginning and the end of what comes in each batch.


HEAD, SPARE, TAIL = (4500, 450_000), (400, 40_000), (5000, 480_000)
"""Lines and bytes of the beginning, of standard error after it, and of the end: below 10,000 and 1 MB in all."""
BRIEF_HEAD, BRIEF_SPARE, BRIEF_TAIL = (150, 14_000), (40, 4_000), (250, 20_000)
"""The same for an agent, whose tools cut longer outputs somewhere."""
HALF = (math.inf, 500_000)
"""The same of each batch for an output that is no cell."""
LIVE_LINES = 12
"""The newest of the lines held back, which are shown live."""


@dataclasses.dataclass(slots=True)
class _Budget:
    lines: float
    bytes: float

    def take(self, block: TextBlock, label_size: int) -> tuple[TextBlock, TextBlock]:
        """Return the lines from the beginning of a block that fit, and the rest."""
        part, rest = block.cut(int(min(self.lines, block.num_lines)))
        if (size := part.message_size(label_size)) > self.bytes:
            most = int(len(part.text) * max(self.bytes, 0) // size)
            part, rest = block.cut(part.text.count("\n", 0, most))
        self.lines -= part.num_lines
        self.bytes -= part.message_size(label_size)
        return part, rest


class Room:
    """Decides which lines of one run are shown at once, held back for the end, or left out.

    `where`: an expression for all lines, such as `run.logs(rank)`. `is_brief`: an agent reads the cell. `is_lasting`:
    False for an output that is no cell, and has the same room for each batch.
    """

    def __init__(self, *, label_size: int, where: str, is_brief: bool = False, is_lasting: bool = True) -> None:
        cell = (BRIEF_HEAD, BRIEF_SPARE, BRIEF_TAIL) if is_brief else (HEAD, SPARE, TAIL)
        self._budgets = cell if is_lasting else (HALF, (0, 0), HALF)
        self._label_size = label_size
        self._where = where
        self._is_lasting = is_lasting
        self._shown: list[TextBlock] = []
        """Lines to show with the next batch."""
        self.reset()

    def reset(self) -> None:
        """Start again with all the room, because the cell was cleared."""
        head, spare, tail = self._budgets
        self._head, self._spare = _Budget(*head), _Budget(*spare)
        """Room that is left for the beginning, and for standard error after the beginning."""
        self._is_full = False
        """True once a line did not fit into the beginning."""
        self._held = Newest(tail, self._label_size)
        """The newest lines, held back for the end."""
        self._left_out: collections.Counter[int] = collections.Counter()
        """By rank: the number of lines that the cell will not show."""

    def push(self, block: TextBlock, *, is_last: bool) -> None:
        """Add a block; `is_last`: the launcher's own lines come after those that are held back."""
        rest = block
        if block.rank is None:
            if not (self._is_full and (is_last or not self._is_lasting)):
                self._shown.append(block)
                return
        elif not self._is_full or block.stream == "stderr":
            part, rest = (self._spare if self._is_full else self._head).take(block, self._label_size)
            self._shown += [part] if part.text else []
        if rest.text:
            self._is_full = True
            for dropped in self._held.push(rest):
                assert dropped.rank is not None
                self._left_out[dropped.rank] += dropped.num_lines

    def take(self, *, is_last: bool) -> list[TextBlock]:
        """Return the lines to show now; with `is_last` also those held back, after a line about those left out."""
        blocks, self._shown = self._shown, []
        if is_last or not self._is_lasting:
            if self._left_out:
                lines, ranks = plural(self._left_out.total(), "line"), rank_list(self._left_out)
                note = f"... {lines} of {ranks} left out here; {self._where} has all ...\n"
                blocks.append(TextBlock(None, "stdout", note))
                self._left_out.clear()
            blocks += self._held.drain()
        if not self._is_lasting:
            self.reset()
        return blocks

    def refund(self, blocks: list[TextBlock], shown: list[str]) -> None:
        """Refund the cost of lines that are shown once for several ranks."""
        self._head.lines += sum(block.num_lines for block in blocks) - sum(text.count("\n") for text in shown)
        self._head.bytes += sum(block.message_size(self._label_size) for block in blocks) - sum(map(num_bytes, shown))

    def live(self) -> tuple[str, list[TextBlock]]:
        """Return a heading and more than enough of the newest lines held back; the heading is empty without any."""
        blocks = self._held.last(LIVE_LINES)
        total = self._held.total[0] + self._left_out.total()
        return (f"... {total:,} more lines; the newest:" if blocks else ""), blocks


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
