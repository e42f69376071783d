"""What a hosted run shows and asks, kept for cells that attach later: a sink that remembers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.detached.ending import read_own_pickle, write_own_pickle
from notebook_launcher.detached.requests import Entry, News, PendingQuestion
from notebook_launcher.history.run_folders import OUTPUT
from notebook_launcher.kernel.display.cell import Sink
from notebook_launcher.kernel.display.questions import Answer
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from notebook_launcher.engines.engine import Stream
    from notebook_launcher.kernel.calls.call_scope import TakesDisplay
    from notebook_launcher.kernel.display.questions import Question


MAX_BYTES = 16_000_000
"""Bytes of output that are kept for cells; the oldest go first. `logs(rank)` has all text in any case."""

COMPANY = 2.0
"""Seconds for which a client that waits counts as still there; it asks for news every half second."""


class Journal(Sink):
    """A sink for the output of a run to which any number of clients attach, from the beginning, and for its questions.

    Args:
        is_awaited: True if a client that can answer is on its way.
    """

    is_cell = True
    """True: the output is cut as for a cell, because a cell shows it in the end."""

    def __init__(self, *, is_awaited: bool = False) -> None:
        self._answerable_at = time.monotonic() if is_awaited else -math.inf
        """Time, by `time.monotonic()`, at which a client asked for news where a person can answer questions."""
        self._changed = threading.Condition()
        """Notified at each entry and question; the host's threads alone use it, in which no interrupt can come."""
        self._entries: collections.deque[Entry] = collections.deque()
        self._num_dropped = 0
        self._bytes = 0
        self._status = ""
        self._is_over = False
        self._keys = itertools.count(1)
        self._questions: dict[int, Question] = {}
        """The unanswered questions by key, in the order in which they were asked."""
        self._reply: Callable[[Answer], object] = lambda _: None
        self._waits_for: Callable[[Question], bool] = lambda _: False

    def connect(self, reply: Callable[[Answer], object], waits_for: Callable[[Question], bool]) -> None:
        """Connect the questions with the run, before it begins; `waits_for` tells if a rank still needs the answer."""
        self._reply, self._waits_for = reply, waits_for

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

    def put(self, question: Question) -> None:
        """Keep a question until a client answers it; if no client can answer, write a line about it."""
        with self._changed:
            self._questions[next(self._keys)] = question
            self._changed.notify_all()
            has_company = time.monotonic() - self._answerable_at < COMPANY
        if not has_company:
            line = f"{question.request.prompt.strip()!r} waits for an answer: attach(...).wait() in a cell asks you"
            self.text("stdout", f"{line}, as does `notebook-launcher attach` in a terminal\n")

    def answer(self, key: int, text: str) -> bool:
        """Pass the line that was typed on to the rank; return False if another client was first, or no rank waits."""
        with self._changed:
            question = self._questions.pop(key, None)
            self._changed.notify_all()
        if question is not None:
            reply = messages.InputReply(text=text, number=question.request.number)
            self._reply(Answer(question.rank, reply, question.call_id))
        return question is not None

    def news(self, position: int, patience: float, asked: tuple[int, ...] = (), *, can_answer: bool = False) -> News:
        """Return what a cell would have shown after a position, once there is something.

        Args:
            position: Position of the last news; 0: all that is kept.
            patience: Longest wait in seconds for an entry or a question.
            asked: Keys of the questions that the client knows; the answer comes at once if there are others.
            can_answer: True if a person can answer questions at the client now.
        """
        with self._changed:
            if can_answer:
                self._answerable_at = time.monotonic()
            self._changed.wait_for(
                lambda: self._is_over or position < self._end or tuple(self._pending()) != asked, patience
            )
            skip = max(0, position - self._num_dropped)
            return News(
                entries=tuple(self._entries)[skip:],
                position=self._end,
                num_left_out=max(0, self._num_dropped - position),
                status=self._status,
                questions=tuple(
                    PendingQuestion(key=key, rank=each.rank, prompt=each.request.prompt, password=each.request.password)
                    for key, each in self._pending().items()
                ),
                is_over=self._is_over,
            )

    def _pending(self) -> dict[int, Question]:
        # The rank may have been stopped or started again since.
        self._questions = {key: question for key, question in self._questions.items() if self._waits_for(question)}
        return self._questions

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
