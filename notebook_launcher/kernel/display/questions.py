"""Questions of ranks (`input()`, `breakpoint()`), answered by the main thread alone, while it waits in a cell."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import threading
from typing import TYPE_CHECKING

from notebook_launcher.kernel.display.asking import ask
from notebook_launcher.kernel.latch import AWAKE_EVERY, Latch
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Answer", "Question", "Questions"]


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question of a rank to the user."""

    rank: int
    request: messages.InputRequest
    call_id: int
    """Number of the call during which the rank asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question."""

    rank: int
    reply: messages.InputReply
    call_id: int
    """Number of the call during which the rank asked."""


class Questions:
    """The questions of one run or debugger, on their way to the thread that waits in the cell.

    Args:
        over: Set when the run or debugger is over, which ends the wait.
    """

    def __init__(self, over: Latch[None]) -> None:
        self._over = over
        self._queue: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        """The questions that wait; None marks the end of the run."""
        self._thread_in_input: int | None = None
        """The thread that waits for the user to type; None if no thread does."""
        self._ends_input = False
        """True from the moment at which `_close` interrupts an `input()` until that interrupt has arrived."""
        over.call_when_set(self._close)

    def put(self, question: Question) -> None:
        """Add a question."""
        self._queue.put(question)

    def _close(self) -> None:
        """End `answer_all`."""
        thread = self._thread_in_input
        if thread is not None and thread == threading.main_thread().ident:
            # Interrupts an `input()` whose answer is no longer needed.
            self._ends_input = True
            signal.pthread_kill(thread, signal.SIGINT)
        self._queue.put(None)

    def answer_all(
        self,
        begin: Callable[[], object],
        reply: Callable[[Answer], None],
        stop: Callable[[bool], object],
        idle: Callable[[], float | None] = lambda: None,
    ) -> bool:
        """Answer questions until the run is over.

        Args:
            begin: Begins the run; called again after an interrupt, which may have cut the first call short.
            reply: Receives the answers.
            stop: Called at each interrupt; its argument is True if there was an interrupt before.
            idle: Called at once; returns the seconds until its next call, which may also come sooner.

        Returns:
            True if there was an interrupt.
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
                if self._ends_input:
                    self._ends_input = False
                    continue
                if not self._over.is_set:  # Else the run has ended while `begin` held the interrupt back.
                    stop(interrupted)
                interrupted = True
                self._drop_waiting()
        return interrupted

    def _drop_waiting(self) -> None:
        """Drop the questions that were asked before an interrupt; it reaches the ranks that wait for answers, too."""
        with contextlib.suppress(queue.Empty):
            while self._queue.get_nowait() is not None:
                pass
            self._queue.put(None)

    def _next(self, idle: Callable[[], float | None]) -> Question | None:
        while True:
            wait = idle()
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=AWAKE_EVERY if wait is None else min(wait, AWAKE_EVERY))
            if self._over.is_set:
                return None  # An interrupt may have lost the end mark that `get` had already removed from the queue.

    def _answer(self, question: Question, reply: Callable[[Answer], None]) -> None:
        request = question.request
        text, reason = None, ""
        try:
            self._thread_in_input = threading.get_ident()
            if self._over.is_set:
                return
            text = ask(request.prompt, password=request.password)
        except EOFError as error:
            reason = str(error)
        finally:
            self._thread_in_input = None
        record = messages.InputReply(text=text, reason=reason, number=request.number)
        reply(Answer(question.rank, record, question.call_id))
