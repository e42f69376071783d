"""Turns the output of all ranks into few notebook messages.

`feed` takes bytes from the ranks' pipes; `take` returns what the cell should show, at most one batch a tick. Lines
stay whole and are labelled with their rank, the same line of several ranks is shown once, and a progress bar takes
one line of the live area instead of a line per redraw. Of a flood of lines, a cell keeps a part (`kept_lines.py`), and
other outputs get a megabyte of each batch. This module reads no clock, no pipe and no kernel.
"""

from __future__ import annotations

import bisect
import codecs
import collections
import dataclasses
import heapq
import itertools
import operator
import re
from typing import TYPE_CHECKING, NamedTuple

from notebook_launcher.kernel.display.kept_lines import LIVE_LINES, LogOrder, RankLog, Room, TextBlock
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from notebook_launcher.engines.engine import Stream
    from notebook_launcher.settings.option_checks import ShownRanks


TICK = 0.25
"""Seconds between two batches."""
GATHER = 0.1
"""Seconds for which the first line of one rank waits for the same line of other ranks."""
MAX_TEXTS = 8
"""The most changes between standard output and error in one batch; further text is sent as standard output."""
MAX_WAITING = 64
"""Pieces of a stream that wait for the end of a bar of the rank's other stream."""
STATUS_ROWS, STATUS_WIDTH = 24, 200
"""The most rows of the live area, and the most characters of a row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Whole lines to append to the cell's output."""

    stream: Stream
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """The new content of the live area: progress bars and unfinished lines; empty if there are none."""

    text: str


Message = Text | Status


class _Source:
    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.screen = Screen()
        self.waiting: list[Lines] = []
        """Lines that must come after a bar that the rank's other stream has just ended."""


class Console:
    """The output of all ranks of one run. Not thread-safe, except for `logs` and `order`.

    `kept_in`: for a cell, an expression for the lines that do not stay in the cell, such as `run.logs(rank)`.
    `nodes`: by rank, the name of its machine; empty if there is one. `is_brief`: an agent reads the cell.
    """

    def __init__(
        self,
        num_processes: int,
        output: ShownRanks = "all",
        *,
        kept_in: str | None = None,
        nodes: Sequence[str] = (),
        is_brief: bool = False,
    ) -> None:
        self.logs = tuple(RankLog() for _ in range(num_processes))
        """By rank: its whole output."""
        self.order = LogOrder()
        """The order in which the newest output of all ranks arrived."""
        self._shown = frozenset(range({"all": num_processes, "rank0": 1, "none": 0}[output]))
        """The ranks whose lines are shown."""
        self._is_labelled = num_processes > 1
        self._sources: dict[tuple[int, Stream], _Source] = {}
        """By rank and stream: the text that is not split into lines yet."""
        self._blank = Screen()
        """Stands for the screen of a stream that a rank has not written to."""
        self.nodes = tuple(nodes)
        """By rank: the name of its machine."""
        label_size = len(label([0], self.nodes)) if self._is_labelled else 0
        self._room = Room(
            label_size=label_size,
            where=kept_in or "run.logs(rank)",
            is_brief=is_brief,
            is_lasting=kept_in is not None,
        )
        """The lines that wait for the next tick, and for the end."""
        self._waiting: set[int | None] = set()
        """The ranks whose lines wait for the next tick; None stands for the launcher."""
        self._status = ""
        """The live area as it was last published."""
        self._progress = ""
        """The launcher's own line of the live area."""
        self._is_at_end = False
        """True from `finish` until the lines that were held back are taken."""
        self._is_pending = False
        """True if the next `take` may have something to return."""
        self._pending_since: float | None = None
        """Time of the first `next_due` after something became pending."""
        self._last_take = float("-inf")
        """Time of the last `take`."""

    def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Add bytes that a rank wrote."""
        source = self._sources.get((rank, stream)) or self._sources.setdefault((rank, stream), _Source())
        self._add_text(rank, stream, source, source.decoder.decode(data))

    def show_rank(self, rank: int) -> None:
        """Show a rank's lines from now on."""
        self._shown |= {rank}

    def notice(self, text: str, stream: Stream = "stdout") -> None:
        """Add a line of the launcher's own; it has no label and is never left out."""
        self._show(TextBlock(None, stream, text.removesuffix("\n") + "\n"))
        self._is_pending = True

    def progress(self, text: str) -> None:
        """Set the launcher's own line of the live area, which stands first; an empty text removes it."""
        if text != self._progress:
            self._progress = text
            self._is_pending = True

    def clear(self) -> None:
        """Start again with all the room of a cell, because the cell was cleared."""
        self._room.reset()

    def finish(self) -> None:
        """End the unfinished lines of all ranks; the next `take` is due at once."""
        for (rank, stream), source in self._sources.items():
            self._add_text(rank, stream, source, source.decoder.decode(b"", final=True))
            source.decoder.reset()
            has_bar, lines = source.screen.has_bar, source.screen.close()
            if has_bar and not source.waiting:
                self._push(rank, stream, lines)
            else:
                source.waiting += lines
        for (rank, stream), source in self._sources.items():
            self._release(rank, stream, source)
        self._is_pending = self._is_pending or bool(self._waiting or self._status)
        self._progress = ""
        self._is_at_end = True
        self._last_take = self._pending_since = float("-inf")

    def next_due(self, now: float) -> float | None:
        """Return the seconds until `take` has something to return; None until more is fed."""
        if not self._is_pending:
            return None
        if self._pending_since is None:
            self._pending_since = now
        due = self._last_take + TICK
        if len(self._shown) > 1 and not self._shown <= self._waiting:
            due = max(due, self._pending_since + GATHER)
        return max(0.0, due - now)

    def take(self, now: float, *, force: bool = False) -> list[Message]:
        """Return what to publish, in order: nothing before it is due, unless forced.

        `now` is in seconds, of a clock that never goes back.
        """
        due = self.next_due(now)
        if not force and (due is None or due > 0):
            return []
        self._last_take = now
        self._pending_since = None
        for (rank, stream), source in self._sources.items():
            lines = source.screen.settle()
            if source.waiting:
                source.waiting += lines
            else:
                self._push(rank, stream, lines)
        for (rank, stream), source in self._sources.items():
            if source.waiting and (force or not self._beside(rank, stream).has_ended_bar):
                self._release(rank, stream, source)
        self._is_pending = any(source.screen.is_unsettled or source.waiting for source in self._sources.values())
        messages: list[Message] = [*self._texts()]
        status = self._draw_status()
        if status != self._status:
            self._status = status
            messages.append(Status(status))
        return messages

    def _add_text(self, rank: int, stream: Stream, source: _Source, text: str) -> None:
        if text:
            self.order.add(rank, self.logs[rank].write(text))
        if text and rank in self._shown:
            self._is_pending = True
            lines = source.screen.write(text)
            if len(source.waiting) < MAX_WAITING and (source.waiting or self._beside(rank, stream).has_bar):
                source.waiting += lines
                return
            if source.waiting:
                self._release(rank, stream, source)
            self._push(rank, stream, lines)

    def _beside(self, rank: int, stream: Stream) -> Screen:
        """Return the screen of a rank's other stream."""
        other = self._sources.get((rank, "stdout" if stream == "stderr" else "stderr"))
        return self._blank if other is None else other.screen

    def _release(self, rank: int, stream: Stream, source: _Source) -> None:
        waiting, source.waiting = source.waiting, []
        self._push(rank, stream, waiting)

    def _push(self, rank: int, stream: Stream, lines: list[Lines]) -> None:
        for text, is_bar in lines:
            # A bar goes to standard error, which front ends show in red.
            self._show(TextBlock(rank, "stdout" if is_bar else stream, text))

    def _show(self, block: TextBlock) -> None:
        self._waiting.add(block.rank)
        self._room.push(block, is_last=self._is_at_end)

    def _texts(self) -> list[Text]:
        blocks = self._room.take(is_last=self._is_at_end)
        self._waiting, self._is_at_end = set(), False
        pieces = [*fold(blocks, labelled=self._is_labelled, nodes=self.nodes)]
        self._room.refund(blocks, [text for _, text in pieces])
        texts = [
            Text(stream, "".join(text for _, text in group))
            for stream, group in itertools.groupby(pieces, key=operator.itemgetter(0))
        ]
        if len(texts) > MAX_TEXTS:
            rest = "".join(text.text for text in texts[MAX_TEXTS - 1 :])
            texts[MAX_TEXTS - 1 :] = [Text("stdout", rest)]
        return texts

    def _draw_status(self) -> str:
        lines: list[str] = []
        heading, blocks = self._room.live()
        if heading:
            newest = "".join(text for _, text in fold(blocks, labelled=self._is_labelled, nodes=self.nodes))
            lines = [heading, *map(_shortened, newest.splitlines()[-LIVE_LINES:])]
        if self._progress:
            lines.append(self._progress[:STATUS_WIDTH])
        bars: dict[int, list[str]] = {}
        for (rank, _), source in sorted(self._sources.items()):
            bars.setdefault(rank, []).extend(source.screen.live())
        rows: dict[str, list[int]] = {}
        for rank, parts in bars.items():
            if parts:  # Nested bars share the row of their rank.
                rows.setdefault(_shortened("  ·  ".join(parts)), []).append(rank)
        lines += [(label(ranks, self.nodes) if self._is_labelled else "") + row for row, ranks in rows.items()]
        if len(lines) > STATUS_ROWS:
            lines[STATUS_ROWS - 1 :] = [f"... and {len(lines) - STATUS_ROWS + 1} more"]
        return "\n".join(lines)


def _shortened(row: str) -> str:
    return row if len(row) <= STATUS_WIDTH else f"{row[:STATUS_WIDTH]} ..."


# --------------------------------------------------------------------------------------------------------------------
# Merges the lines of several ranks into one text: each line with its rank, equal lines of several ranks once.


def label(ranks: Iterable[int], nodes: Sequence[str] = ()) -> str:
    """Return the label of a line that these ranks wrote: `[ranks 0,2] `, or `[ranks 0,1 on gpu1] `."""
    ranks = tuple(ranks)
    names = {nodes[rank] for rank in ranks} if nodes else set()
    place = f" on {names.pop()}" if len(names) == 1 else ""
    return f"[{rank_list(ranks).replace(', ', ',')}{place}] "


def fold(blocks: Iterable[TextBlock], *, labelled: bool, nodes: Sequence[str] = ()) -> Iterator[tuple[Stream, str]]:
    """Yield the text with its labels, in the order of arrival as far as merging equal lines allows.

    The order of each rank's own lines never changes. Lines of a single rank, and text without labels, are not split
    into lines.
    """
    blocks = list(blocks)
    if labelled and len({block.rank for block in blocks} - {None}) > 1:
        yield from _fold_lines(blocks, nodes)
        return
    for block in blocks:
        if labelled and block.rank is not None:
            prefix = label([block.rank], nodes)
            yield block.stream, prefix + block.text[:-1].replace("\n", "\n" + prefix) + "\n"
        else:
            yield block.stream, block.text


@dataclasses.dataclass(slots=True)
class _Line:
    order: int
    stream: Stream
    text: str
    ranks: tuple[int, ...]


def _fold_lines(blocks: Iterable[TextBlock], nodes: Sequence[str]) -> Iterator[tuple[Stream, str]]:
    per_rank: dict[int | None, list[_Line]] = collections.defaultdict(list)
    for order, block in enumerate(blocks):
        ranks = () if block.rank is None else (block.rank,)
        per_rank[block.rank] += [_Line(order, block.stream, text, ranks) for text in block.text[:-1].split("\n")]
    merged: list[_Line] = []
    for lines in per_rank.values():
        merged = _merge(merged, lines)
    labels = {ranks: label(ranks, nodes) if ranks else "" for ranks in {line.ranks for line in merged}}
    for line in merged:
        yield line.stream, f"{labels[line.ranks]}{line.text}\n"


def _merge(merged: list[_Line], lines: list[_Line]) -> list[_Line]:
    """Add the lines of one more rank: each to an equal line that is there already, otherwise between its neighbours."""
    places: dict[tuple[Stream, str], list[int]] = collections.defaultdict(list)
    for place, line in enumerate(merged):
        if line.ranks:
            places[line.stream, line.text].append(place)
    result: list[_Line] = []
    unmatched: list[_Line] = []
    start = 0
    for line in lines:
        candidates = places.get((line.stream, line.text), ()) if line.ranks else ()
        found = bisect.bisect_left(candidates, start)
        # An empty line equals every other empty line: matching one far ahead would separate lines that belong together.
        if found == len(candidates) or not (line.text or candidates[found] == start):
            unmatched.append(line)
            continue
        result += _by_arrival(merged[start : candidates[found]], unmatched)
        same = merged[candidates[found]]
        same.ranks += line.ranks
        result.append(same)
        start = candidates[found] + 1
        unmatched = []
    return result + _by_arrival(merged[start:], unmatched)


def _by_arrival(first: list[_Line], second: list[_Line]) -> list[_Line]:
    return list(heapq.merge(first, second, key=operator.attrgetter("order"))) if second else first


# --------------------------------------------------------------------------------------------------------------------
# One stream as a terminal would show it: whole lines, and the line that is still being written.
#
# Progress bars redraw themselves with carriage returns, nested ones also with "cursor up" (`ESC [ A`). A line is
# final once the cursor has left it for good; until then it is live. Text without either is passed through in bulk,
# because a rank can print a million lines.


LINE_LIMIT = 32_768
"""Characters of one line that are shown; a browser cannot lay out more in reasonable time."""
REACH = 50
"""Rows that "cursor up" can go back over."""

CURSOR_UP = re.compile(r"\x1b\[(\d*)A")
UNSEEN = re.compile(r"\x1b\[(\d*K|\?\d+[hl])")
"""Erasing the rest of a line, which is redrawn anyway, and modes of a terminal, such as hiding its cursor."""


class Lines(NamedTuple):
    """Final lines, each with its newline."""

    text: str
    is_bar: bool = False
    """True for the last states of progress bars."""


class Screen:
    """One stream of one rank."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._rows = [""]
        """The rows that are not final yet."""
        self._were_bars = [False]
        """By row: True if a carriage return has redrawn the row."""
        self._cursor = 0
        """The row on which the cursor is."""
        self._overwrite = False
        """True if the cursor is at the left edge: the next text replaces the row."""
        self._is_bar = False
        """True if a carriage return has redrawn the cursor's row."""
        self._left_bar = False
        """True if the row above is a bar, to which "cursor up" may come back."""
        self._num_cut = 0
        """Characters of the cursor's row beyond LINE_LIMIT, which are dropped."""
        self._finished_rows = False
        """True if a row was finished in this tick."""
        self._age = 0
        """Ticks for which the live rows have been there."""

    def write(self, text: str) -> list[Lines]:
        """Add text; return the lines that are final."""
        simple = len(self._rows) == 1 and not (self._overwrite or self._is_bar or "\r" in text)
        if not simple or ("\x1b" in text and (CURSOR_UP.search(text) or UNSEEN.search(text))):
            return self._draw(text)
        head, newline, tail = text.rpartition("\n")
        if not newline:
            self._append(text)
            return []
        first, _, rest = head.partition("\n")
        self._append(first)
        lines = self._close_row() + "\n"
        if len(first) < len(head):
            lines += bound_lines(rest + "\n")
        self._rows[0] = ""
        self._finished_rows = True
        self._append(tail)
        return [Lines(lines)]

    def settle(self) -> list[Lines]:
        """End a tick; return the lines above the cursor, which are final: the cursor has not come back to them."""
        keep = self._cursor
        # A nested bar moves down, draws and moves up again in separate writes, so a bar that the cursor has just
        # left downwards is final only if the cursor is still below it one tick later.
        if self._left_bar and (self._is_bar or self._overwrite or not self._rows[self._cursor]):
            keep -= 1
        self._left_bar = False
        lines = self._take_rows(keep)
        while len(self._rows) > self._cursor + 1 and not self._rows[-1].strip():
            self._rows.pop()
            self._were_bars.pop()
        if not any(row.strip() for row in self._rows):
            self._age = 0
        else:
            self._age = 1 if self._finished_rows else self._age + 1
        self._finished_rows = False
        return lines

    def close(self) -> list[Lines]:
        """Return the remaining text as final lines, and start again."""
        self._rows[self._cursor] = self._close_row()
        rest = self._take_rows(self._cursor)
        for at in reversed(range(len(self._rows))):
            if not self._rows[at].strip():
                del self._rows[at], self._were_bars[at]
        rest += self._take_rows(len(self._rows))
        self._reset()
        return rest

    @property
    def is_unsettled(self) -> bool:
        """True if another tick is needed to decide what to show, even if no text arrives."""
        return self._age == 1

    @property
    def has_bar(self) -> bool:
        """True if a bar is drawn here, or has just ended."""
        return self._is_bar or any(self._were_bars)

    @property
    def has_ended_bar(self) -> bool:
        """True if a bar has ended and its last state is not among the final lines yet."""
        return any(self._were_bars[: self._cursor])

    def live(self) -> list[str]:
        """Return the unfinished rows: bars immediately, plain text once it has been there for two ticks."""
        if self._is_bar or len(self._rows) > 1 or self._age > 1:
            return [row.rstrip() for row in self._rows if row.strip()]
        return []

    def _draw(self, text: str) -> list[Lines]:
        lines: list[Lines] = []
        *ended, last = text.split("\n")
        for line in ended:
            self._write_moving(line.rstrip("\r"))
            self._next_row()
            if self._cursor > 2 * REACH:
                lines += self._take_rows(self._cursor - REACH)
        self._write_moving(last)
        return lines

    def _write_moving(self, line: str) -> None:
        if "\x1b" not in line:
            self._write_row(line)
            return
        first, *rest = CURSOR_UP.split(UNSEEN.sub("", line))
        self._write_row(first)
        for count, piece in zip(rest[::2], rest[1::2], strict=True):
            self._move_up(int(count or 1))
            self._write_row(piece)

    def _write_row(self, text: str) -> None:
        body = text.rstrip("\r")
        _, returned, last = body.rpartition("\r")
        if body:
            if returned or self._overwrite:
                self._rows[self._cursor] = ""
                self._num_cut = 0
            self._append(last)
            self._overwrite = False
        self._is_bar = self._is_bar or bool(returned)
        if len(body) < len(text):
            self._overwrite = self._is_bar = True

    def _append(self, text: str) -> None:
        row = self._rows[self._cursor]
        room = LINE_LIMIT - len(row)
        if len(text) > room:
            self._num_cut += len(text) - room
            text = text[:room]
        self._rows[self._cursor] = row + text

    def _close_row(self) -> str:
        row = self._rows[self._cursor]
        self._were_bars[self._cursor] |= self._is_bar
        if self._num_cut:
            row += cut_note(self._num_cut)
            self._num_cut = 0
        return row

    def _next_row(self) -> None:
        self._rows[self._cursor] = self._close_row()
        self._left_bar = self._is_bar and bool(self._rows[self._cursor].strip())
        self._is_bar = False
        self._finished_rows = True
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._rows.append("")
            self._were_bars.append(False)
        self._overwrite = bool(self._rows[self._cursor])

    def _move_up(self, count: int) -> None:
        self._cursor = max(0, self._cursor - count)
        self._is_bar = True
        self._left_bar = False
        self._overwrite = False

    def _take_rows(self, count: int) -> list[Lines]:
        if count <= 0:
            return []
        rows = zip(self._rows[:count], self._were_bars[:count], strict=True)
        groups = itertools.groupby(rows, key=lambda row: row[1])
        lines = [Lines("".join(f"{text}\n" for text, _ in group), is_bar) for is_bar, group in groups]
        del self._rows[:count], self._were_bars[:count]
        self._cursor -= count
        return lines


def cut_note(num_cut: int) -> str:
    """Return the note that replaces the rest of a line that is too long."""
    return f" ... [{num_cut:,} more characters in this line]"


def bound_lines(lines: str) -> str:
    """Cut lines that are too long in a text of whole lines."""
    start = 0
    while len(lines) - start > LINE_LIMIT:
        end = lines.rfind("\n", start, start + LINE_LIMIT + 1)
        if end < 0:
            stop = lines.index("\n", start)
            note = cut_note(stop - start - LINE_LIMIT)
            end = start + LINE_LIMIT + len(note)
            lines = lines[: start + LINE_LIMIT] + note + lines[stop:]
        start = end + 1
    return lines
