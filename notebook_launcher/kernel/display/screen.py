"""One stream as a terminal would show it: whole lines, and the line that is still being written.

Progress bars redraw themselves with carriage returns, nested ones also with "cursor up" (`ESC [ A`).
A line is final once the cursor has left it for good; until then it is live. Text without either is
passed through in bulk, because a rank can print a million lines.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

__all__ = ["LINE_LIMIT", "Lines", "Screen"]

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
