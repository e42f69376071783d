"""Questions of a detached run's ranks, answered by a client's main thread while it waits for the run."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from typing import TYPE_CHECKING

from notebook_launcher.detached.requests import AnswerQuestion
from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel.display.asking import ask, why_no_answers
from notebook_launcher.kernel.display.sink import make_sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.detached.requests import PendingQuestion

__all__ = ["AttachedQuestions"]


class AttachedQuestions:
    """The questions that wait in the host, on their way to the thread that waits in a cell or terminal.

    Several clients may ask the same question at once. The first answer counts, and the other prompts end.

    Args:
        send: Sends an answer to the host.
    """

    def __init__(self, send: Callable[[AnswerQuestion], object]) -> None:
        self._send = send
        self._pending: tuple[PendingQuestion, ...] = ()
        self._answered: set[int] = set()
        """Keys of the questions that were answered here; the host may not have confirmed it yet."""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the thread that waits."""
        self._in_input: tuple[int, int] | None = None
        """Thread that waits for the user to type, and the key of its question."""
        self._has_withdrawn = False
        """True from the interrupt of a prompt whose answer is no longer needed until the interrupt has arrived."""
        self._has_given_up = False
        """True once no question is to be asked: a prompt ended without an answer, because standard input is at its end
        or this front end cannot ask, or the run is being stopped."""
        self.can_answer = False
        """True while a thread waits that can ask the user."""

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the questions that are known here."""
        return tuple(question.key for question in self._pending)

    def note(self, pending: tuple[PendingQuestion, ...]) -> None:
        """Take over the questions that wait in the host now; end a prompt whose question does not wait any more."""
        is_news = pending != self._pending
        self._pending = pending
        if (asked := self._in_input) is not None and asked[1] not in self.keys:
            thread, self._has_withdrawn = asked[0], True
            signal.pthread_kill(thread, signal.SIGINT)
        if is_news:
            self.wake()

    def wake(self) -> None:
        """End the present call of `serve`."""
        self._news.put(None)

    def give_up(self) -> None:
        """Ask nothing any more, because the ranks that ask are being stopped."""
        self._has_given_up = True

    @contextlib.contextmanager
    def served(self) -> Iterator[bool]:
        """Mark this thread as waiting in the block; yield True if it can ask the user, so that `serve` may run."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or self._has_given_up or why_no_answers():
            yield False
            return
        self.can_answer = True
        try:
            yield True
        finally:
            self.can_answer = False

    def serve(self, patience: float) -> None:
        """Ask the user the next question, for which this waits at most `patience` seconds.

        Raises:
            KeyboardInterrupt: The user interrupted the wait or the prompt.
        """
        try:
            question = self._next()
            if question is None or self._has_given_up:
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=patience)
                question = self._next()
            if question is not None and not self._has_given_up:
                self._ask(question)
        except KeyboardInterrupt:
            if not self._has_withdrawn:
                raise
            self._has_withdrawn = False

    def _next(self) -> PendingQuestion | None:
        return next((question for question in self._pending if question.key not in self._answered), None)

    def _ask(self, question: PendingQuestion) -> None:
        try:
            self._in_input = threading.get_ident(), question.key
            if question.key not in self.keys:
                return
            text = ask(question.prompt, password=question.password)
        except EOFError as error:
            # No user may be here, but one at another client.
            self._has_given_up, self.can_answer = True, False
            make_sink().text("stderr", f"{error} The question waits for another client.\n")
            return
        finally:
            self._in_input = None
        self._answered.add(question.key)
        # If the host is gone, the run is over, which the wait finds out.
        with contextlib.suppress(OSError, EOFError, CallOrderError):
            self._send(AnswerQuestion(key=question.key, text=text))
