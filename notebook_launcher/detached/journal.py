"""The output of a hosted run, kept for cells that attach later: a sink that remembers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached.ending import read_own_pickle, write_own_pickle
from notebook_launcher.detached.requests import Entry, News
from notebook_launcher.history.run_folders import OUTPUT
from notebook_launcher.kernel.display.cell import Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from notebook_launcher.detached.requests import Follow, PendingQuestion
    from notebook_launcher.engines.engine import Stream
    from notebook_launcher.kernel.calls.call_scope import TakesDisplay
    from notebook_launcher.messaging import messages


MAX_BYTES = 16_000_000
"""Bytes of output that are kept for cells; the oldest go first. `logs(rank)` has all text in any case."""

COMPANY = 2.0
"""Seconds for which a client that waits counts as still there; it asks for news every half second."""


class Journal(Sink):
    """A sink for the output of a run to which any number of clients attach, from the beginning.

    Args:
        pending: Returns the questions that wait for an answer.
        is_awaited: True if a client that can answer is on its way.
    """

    is_cell = True
    """True: the output is cut as for a cell, because a cell shows it in the end."""

    def __init__(self, pending: Callable[[], tuple[PendingQuestion, ...]] = tuple, *, is_awaited: bool = False) -> None:
        self._pending = pending
        self._answerable_at = time.monotonic() if is_awaited else -math.inf
        """Time, by `time.monotonic()`, at which a client asked for news where a person can answer questions."""
        self._changed = threading.Condition()
        """Notified at each entry; the host's threads alone use it, in which no interrupt can come."""
        self._entries: collections.deque[Entry] = collections.deque()
        self._num_dropped = 0
        self._bytes = 0
        self._status = ""
        self._is_over = False

    def text(self, stream: Stream, text: str) -> None:
        """Keep text."""
        self._add("text", (stream, text), len(text))

    def status(self, text: str) -> None:
        """Keep the line of progress in place of the last one."""
        with self._changed:
            self._status = text

    def display(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        transient: Mapping[str, Any] | None = None,
        *,
        update: bool = False,
    ) -> None:
        """Keep rich output."""
        size = sum(len(value) for value in data.values() if isinstance(value, str | bytes))
        self._add("update" if update else "display", (dict(data), dict(metadata or {}), dict(transient or {})), size)

    def divert(self, displays: TakesDisplay, rank: int, record: messages.Display | messages.ClearOutput) -> bool:
        """Keep rich output that a cell on ranks shows at its end; return False if it is to be shown as it comes."""
        if not displays(rank, record):
            return False
        size = sum(len(value) for value in getattr(record, "data", {}).values() if isinstance(value, str | bytes))
        self._add("divert", (rank, record), size)
        return True

    def clear_output(self, *, wait: bool = False) -> None:
        """Forget earlier output, and have attached cells clear it."""
        with self._changed:
            self._num_dropped += len(self._entries)
            self._entries.clear()
            self._bytes = 0
        self._add("clear_output", (wait,), 0)

    def finish(self) -> None:
        """Note that the run is over and its ending is kept."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def asked(self, question: PendingQuestion | None) -> None:
        """Send clients a new question, or that one is answered; if no client can answer, write a line about it."""
        with self._changed:
            self._changed.notify_all()
            has_company = time.monotonic() - self._answerable_at < COMPANY
        if question is not None and not has_company:
            line = f"{question.prompt.strip()!r} waits for an answer: attach(...).wait() in a cell asks you"
            self.text("stdout", f"{line}, as does `notebook-launcher attach` in a terminal\n")

    def news(self, request: Follow) -> News:
        """Return the entries after a position; wait for one, or for a question, at most as long as the client does."""
        position = request.position
        with self._changed:
            if request.can_answer:
                self._answerable_at = time.monotonic()
            self._changed.wait_for(
                lambda: self._is_over or position < self._end or self._keys() != request.asked, request.patience
            )
            skip = max(0, position - self._num_dropped)
            return News(
                entries=tuple(self._entries)[skip:],
                position=self._end,
                num_left_out=max(0, self._num_dropped - position),
                status=self._status,
                questions=self._pending(),
                is_over=self._is_over,
            )

    def _keys(self) -> tuple[int, ...]:
        return tuple(question.key for question in self._pending())

    @property
    def _end(self) -> int:
        return self._num_dropped + len(self._entries)

    def _add(self, method: str, args: tuple[Any, ...], size: int) -> None:
        with self._changed:
            self._entries.append(Entry(time=time.time(), method=method, args=args, size=size))
            self._bytes += size
            while self._bytes > MAX_BYTES and len(self._entries) > 1:
                self._bytes -= self._entries.popleft().size
                self._num_dropped += 1
            self._changed.notify_all()


# --------------------------------------------------------------------------------------------------------------------
# The output of a hosted run as its cell showed it, kept in the run's folder for cells that attach after its end.


def write_output(folder: Path, news: News) -> None:
    """Keep the whole output of a run that is over; nothing if there was none. A full disk costs the output alone."""
    if news.position:
        with contextlib.suppress(OSError):
            write_own_pickle(folder, OUTPUT, news)


def read_output(folder: Path, position: int) -> News | None:
    """Return a run's output after a position; None if its folder keeps none that this version and user can read."""
    with contextlib.suppress(Exception):
        news: News = read_own_pickle(folder, OUTPUT)
        return dataclasses.replace(news, entries=news.entries[max(0, position - news.num_left_out) :])
    return None
