"""Turns the output of all ranks into few notebook messages.

`feed` takes bytes from the ranks' pipes; `take` returns what the cell should show, at most one batch a tick. Lines
stay whole and are labelled with their rank, the same line of several ranks is shown once, and a progress bar takes
one line of the live area instead of a line per redraw. Of a flood of lines, a cell keeps a part (`room.py`), and
other outputs get as much as a terminal or a file can take. This module reads no clock, no pipe and no kernel.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING

from notebook_launcher.kernel.display.backlog import Backlog
from notebook_launcher.kernel.display.folding import fold, label
from notebook_launcher.kernel.display.log_order import LogOrder
from notebook_launcher.kernel.display.ranklog import RankLog
from notebook_launcher.kernel.display.room import LIVE_LINES, Room
from notebook_launcher.kernel.display.screen import Lines, Screen
from notebook_launcher.kernel.display.text_block import TextBlock, num_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.engines.events import Stream
    from notebook_launcher.settings.option_choices import ShownRanks

__all__ = ["Console", "Message", "RankLog", "Status", "Text"]

TICK = 0.25
"""Seconds between two batches."""
GATHER = 0.1
"""Seconds for which the first line of one rank waits for the same line of other ranks."""
BURST = 1_000_000
RATE = 600_000
"""Bytes per second; with BURST at most 2.8 MB in the 3 s over which Jupyter measures."""
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

    Args:
        num_processes: Number of ranks.
        output: The ranks whose lines are shown.
        kept_in: For a cell: an expression for the lines that do not stay in the cell, such as `run.logs(rank)`;
            None: all lines stay.
        nodes: By rank: the name of its machine; empty if there is one.
        is_brief: True for a cell that an agent reads.
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
        self._backlog = Backlog(label_size=label_size)
        """Lines that wait for the next tick."""
        self._room = None if kept_in is None else Room(label_size=label_size, where=kept_in, is_brief=is_brief)
        """The lines that a cell keeps; None for other outputs, which keep all lines."""
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
        self._tokens = float(BURST)
        """Bytes that may be published now; they grow with RATE up to BURST."""
        self._tokens_at = float("-inf")
        """Time at which `_tokens` was computed."""

    def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Add bytes that a rank wrote."""
        source = self._sources.get((rank, stream)) or self._sources.setdefault((rank, stream), _Source())
        self._add_text(rank, stream, source, source.decoder.decode(data))

    def show_rank(self, rank: int) -> None:
        """Show a rank's lines from now on."""
        self._shown |= {rank}

    def notice(self, text: str, stream: Stream = "stdout") -> None:
        """Add a line of the launcher's own; it has no label and is never left out."""
        self._backlog.push(TextBlock(None, stream, text.removesuffix("\n") + "\n"))
        self._is_pending = True

    def progress(self, text: str) -> None:
        """Set the launcher's own line of the live area, which stands first; an empty text removes it."""
        if text != self._progress:
            self._progress = text
            self._is_pending = True

    def clear(self) -> None:
        """Start again with all the room of a cell, because the cell was cleared."""
        if self._room is not None:
            self._room.reset()

    def finish(self, rank: int | None = None) -> None:
        """End the unfinished lines of one rank, or of all ranks; for all ranks the next `take` is due at once."""
        for (owner, stream), source in self._sources.items():
            if rank in (None, owner):
                self._add_text(owner, stream, source, source.decoder.decode(b"", final=True))
                source.decoder.reset()
                self._end_screen(owner, stream, source)
        for (owner, stream), source in self._sources.items():
            if rank in (None, owner):
                self._release(owner, stream, source)
        self._is_pending = self._is_pending or bool(self._backlog or self._status)
        if rank is None:
            self._progress = ""
            self._is_at_end = True
            self._last_take = self._pending_since = float("-inf")

    def _end_screen(self, rank: int, stream: Stream, source: _Source) -> None:
        has_bar = source.screen.has_bar
        lines = source.screen.close()
        if has_bar and not source.waiting:
            self._push(rank, stream, lines)
        else:
            source.waiting += lines

    def next_due(self, now: float) -> float | None:
        """Return the seconds until `take` has something to return; None until more is fed."""
        if not self._is_pending:
            return None
        if self._pending_since is None:
            self._pending_since = now
        due = self._last_take + TICK
        if len(self._shown) > 1 and not self._shown <= self._backlog.ranks:
            due = max(due, self._pending_since + GATHER)
        return max(0.0, due - now)

    def take(self, now: float, *, force: bool = False) -> list[Message]:
        """Return what to publish, in order: nothing before it is due, unless forced.

        `now` is in seconds, of a clock that never goes back.
        """
        due = self.next_due(now)
        if not force and (due is None or due > 0):
            return []
        self._tokens = min(BURST, self._tokens + RATE * min(now - self._tokens_at, BURST / RATE))
        self._tokens_at = self._last_take = now
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
            self._backlog.push(TextBlock(rank, "stdout" if is_bar else stream, text))

    def _texts(self) -> list[Text]:
        blocks = self._backlog.drain(self._tokens) if self._room is None else self._in_room(self._room)
        pieces = [*fold(blocks, labelled=self._is_labelled, nodes=self.nodes)]
        if self._room is not None:
            self._room.refund(blocks, [text for _, text in pieces])
        texts = [
            Text(stream, "".join(text for _, text in group))
            for stream, group in itertools.groupby(pieces, key=operator.itemgetter(0))
        ]
        if len(texts) > MAX_TEXTS:
            rest = "".join(text.text for text in texts[MAX_TEXTS - 1 :])
            texts[MAX_TEXTS - 1 :] = [Text("stdout", rest)]
        self._tokens -= sum(num_bytes(text.text) for text in texts)
        return texts

    def _in_room(self, room: Room) -> list[TextBlock]:
        """Return the new lines that the cell has room for; at the end also the lines that were held back."""
        blocks = room.admit(*self._backlog.drain_parts(), is_last=self._is_at_end)
        if self._is_at_end:
            self._is_at_end = False
            blocks += room.drain()
        return blocks

    def _newest(self) -> list[str]:
        """Return the newest lines that are held back, below a heading."""
        if self._room is None:
            return []
        heading, blocks = self._room.live()
        lines = "".join(text for _, text in fold(blocks, labelled=self._is_labelled, nodes=self.nodes)).splitlines()[
            -LIVE_LINES:
        ]
        return [heading, *(_shortened(line) for line in lines)] if heading else []

    def _draw_status(self) -> str:
        bars: dict[int, list[str]] = {}
        for (rank, _), source in sorted(self._sources.items()):
            bars.setdefault(rank, []).extend(source.screen.live())
        rows: dict[str, list[int]] = {}
        for rank, parts in bars.items():
            if parts:  # Nested bars share the row of their rank.
                rows.setdefault(_shortened("  ·  ".join(parts)), []).append(rank)
        lines = self._newest() + ([self._progress[:STATUS_WIDTH]] if self._progress else [])
        lines += [(label(ranks, self.nodes) if self._is_labelled else "") + row for row, ranks in rows.items()]
        if len(lines) > STATUS_ROWS:
            lines[STATUS_ROWS - 1 :] = [f"... and {len(lines) - STATUS_ROWS + 1} more"]
        return "\n".join(lines)


def _shortened(row: str) -> str:
    return row if len(row) <= STATUS_WIDTH else f"{row[:STATUS_WIDTH]} ..."
