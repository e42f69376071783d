"""Questions of a hosted run's ranks (`input()`, `breakpoint()`), kept in the host until a client answers."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from notebook_launcher.detached.requests import PendingQuestion
from notebook_launcher.kernel.display.questions import Answer
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.kernel.display.questions import Question

__all__ = ["HostQuestions"]


class HostQuestions:
    """The unanswered questions of one run."""

    def __init__(self) -> None:
        self._keys = itertools.count(1)
        self._open: dict[int, Question] = {}
        """By key, in the order in which they were asked."""
        self._lock = threading.Lock()
        self._asked: Callable[[PendingQuestion | None], object] = lambda _: None
        self._reply: Callable[[Answer], object] | None = None
        self._waits_for: Callable[[Question], bool] = lambda _: False

    def connect(
        self,
        asked: Callable[[PendingQuestion | None], object],
        reply: Callable[[Answer], object],
        waits_for: Callable[[Question], bool],
    ) -> None:
        """Connect the questions with the run and its journal, before the run begins.

        Args:
            asked: Called with each new question, and with None after an answer.
            reply: Called with each answer.
            waits_for: Returns True if a rank still waits for the answer to a question.
        """
        self._asked, self._reply, self._waits_for = asked, reply, waits_for

    def put(self, question: Question) -> None:
        """Keep a question until a client answers it."""
        with self._lock:
            key = next(self._keys)
            self._open[key] = question
        self._asked(_describe(key, question))

    def pending(self) -> tuple[PendingQuestion, ...]:
        """Return the questions for whose answers ranks wait."""
        with self._lock:
            # The rank may have been stopped or started again since.
            self._open = {key: question for key, question in self._open.items() if self._waits_for(question)}
            return tuple(_describe(key, question) for key, question in self._open.items())

    def answer(self, key: int, text: str) -> bool:
        """Pass the line that was typed on to the rank; return False if another client was first, or no rank waits."""
        with self._lock:
            question = self._open.pop(key, None)
        if question is None or self._reply is None:
            return False
        record = messages.InputReply(text=text, number=question.request.number)
        self._reply(Answer(question.rank, record, question.call_id))
        self._asked(None)
        return True


def _describe(key: int, question: Question) -> PendingQuestion:
    request = question.request
    return PendingQuestion(key=key, rank=question.rank, prompt=request.prompt, password=request.password)
