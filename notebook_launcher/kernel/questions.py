"""What ranks ask (`input()`, `breakpoint()`), and the main thread, which alone may answer, while it waits in a cell."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import threading
from typing import TYPE_CHECKING

from notebook_launcher import messages
from notebook_launcher.kernel import cell
from notebook_launcher.kernel.latch import AWAKE_EVERY

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Answer", "Question", "Questions"]


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What a rank asks during a call."""

    rank: int
    request: messages.InputRequest
    call_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What it is answered."""

    rank: int
    reply: messages.InputReply
    call_id: int


class Questions:
    """The questions of one run, from its thread to the one that waits in the cell."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._queue: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread_in_input: int | None = None

    def put(self, question: Question) -> None:
        """Pass a question on."""
        self._queue.put(question)

    def close(self) -> None:
        """End `answer_all`, once the run is over."""
        thread = self._thread_in_input
        if thread is not None and thread == threading.main_thread().ident:
            # Out of an `input()` whose answer nobody needs any more.
            signal.pthread_kill(thread, signal.SIGINT)
        self._queue.put(None)

    def answer_all(
        self,
        begin: Callable[[], object],
        reply: Callable[[Answer], None],
        stop: Callable[[bool], object],
        idle: Callable[[], float | None] = lambda: None,
    ) -> bool:
        """Answer until the run is over.

        Args:
            begin: Begins the run; called again after an interrupt, which may have come in the middle of it.
            reply: Takes the answers.
            stop: Called at each interrupt, with whether there was one before.
            idle: Called at once, and again after as many seconds as it returned, or sooner.

        Returns:
            Whether there was an interrupt.
        """
        interrupted = False
        while True:
            try:
                begin()
                question = self._next(idle)
                if question is None:
                    break
                self._answer(question, reply)
            except KeyboardInterrupt:
                if self._is_over():
                    continue  # Our own, from `close`.
                stop(interrupted)
                interrupted = True
        return interrupted

    def _next(self, idle: Callable[[], float | None]) -> Question | None:
        while True:
            pause = idle()
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=AWAKE_EVERY if pause is None else min(pause, AWAKE_EVERY))
            if self._is_over():
                return None  # An interrupt may have come between taking what `close` put and giving it back.

    def _answer(self, question: Question, reply: Callable[[Answer], None]) -> None:
        request = question.request
        text, reason = None, ""
        try:
            self._thread_in_input = threading.get_ident()
            if self._is_over():
                return
            text = cell.ask(request.prompt, password=request.password)
        except EOFError as error:
            reason = str(error)
        finally:
            self._thread_in_input = None
        record = messages.InputReply(text=text, reason=reason, number=request.number)
        reply(Answer(question.rank, record, question.call_id))
