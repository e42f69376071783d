"""The output of a detached run in a cell that is attached: the host's journal, shown on the cell's sink."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from notebook_launcher.detached.host_socket import HostConnection, HostSilentError
from notebook_launcher.detached.journal import read_output
from notebook_launcher.errors import CallOrderError
from notebook_launcher.history.run_folders import SOCKET
from notebook_launcher.kernel.display.questions import ask, why_no_answers
from notebook_launcher.kernel.display.sink import ShownOutput, make_sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.detached.requests import Entry, News, PendingQuestion
    from notebook_launcher.kernel.calls.call_scope import TakesDisplay


PATIENCE = 0.5
"""Seconds after which the host answers even if there is no output, which bounds the age of the line of progress."""


class AttachedOutput(ShownOutput):
    """Shows the journal of a run's host. Create it in the thread whose cell gets the output."""

    def __init__(
        self,
        folder: Path,
        config: LaunchConfig,
        since: float | None,
        displays: TakesDisplay | None = None,
        *,
        socket_name: str = SOCKET,
    ) -> None:
        super().__init__(make_sink(), config)
        self._folder = folder
        self._socket_name = socket_name
        self._displays = displays
        self.is_raised = False
        """True if the cell raises the exception with which the run fails."""
        self._from = -math.inf if since is None else time.time() - since
        self._is_detached = False

    def follow(self, questions: AttachedQuestions) -> None:
        """Show what comes until the run is over or its host is gone; call it in a thread."""
        position = 0
        for news in follow(self._folder, questions, 0, self._socket_name):
            position = self._take(news, position)
            if news.is_over:
                return
        if (kept := read_output(self._folder, position)) is not None:
            self._take(kept, position)

    def _take(self, news: News, position: int) -> int:
        if self._is_detached:
            return position
        if news.num_left_out and not position and self._from == -math.inf:
            self.say("earlier output is left out here; run.logs(rank) has all of it")
        for entry in news.entries:
            if entry.time >= self._from:
                self._show(entry)
        self.sink.status(news.status if self.shows_progress else "")
        return news.position

    def _show(self, entry: Entry) -> None:
        # A closed pipe or file must not end the thread that waits for the run.
        with contextlib.suppress(Exception):
            match entry.method, entry.args:
                case "text", (stream, text):
                    self.sink.text(stream, text)
                case "divert", (rank, record):
                    if self._displays is not None:
                        self._displays(rank, record)
                case "clear_output", (wait,):
                    self.sink.clear_output(wait=wait)
                case kind, (data, metadata, transient):
                    self.sink.display(data, metadata, transient, update=kind == "update")

    def say(self, line: str) -> None:
        """Show one line of the launcher's own."""
        with contextlib.suppress(Exception):
            self.sink.text("stdout", f"{line}\n")

    def end(self, line: str) -> None:
        """Show the run's last line, or leave it to the picture."""
        if self._is_detached or not self.has_headlines:
            line = ""
        if line and time.monotonic() < self.picture_from:
            self.say(line)
        else:
            self.last_line = line
        with contextlib.suppress(Exception):
            self.sink.close()

    def detach(self) -> None:
        """Show nothing more, because the cell has ended; the run continues."""
        self._is_detached = True
        with contextlib.suppress(Exception):
            self.sink.close()


def follow(
    folder: Path, questions: AttachedQuestions, position: int = sys.maxsize, socket_name: str = SOCKET
) -> Iterator[News]:
    """Yield a host's news after a position until the run is over or the host is gone; with no position, none.

    What the ranks ask goes to `questions`.
    """
    with contextlib.suppress(OSError, CallOrderError), contextlib.closing(_connect(folder, socket_name)) as connection:
        while True:
            news: News = connection.request("news", position, PATIENCE, questions.keys, can_answer=questions.can_answer)
            questions.note(news.questions)
            yield news
            if news.is_over:
                return
            position = max(position, news.position)


def _connect(folder: Path, socket_name: str) -> HostConnection:
    """Connect to a host, however long it is silent: it is not dead, and its run's limit or a user lets it go on."""
    while True:
        with contextlib.suppress(HostSilentError):
            return HostConnection(folder, socket_name)


# --------------------------------------------------------------------------------------------------------------------
# Questions of a detached run's ranks, answered by a client's main thread while it waits for the run.


class AttachedQuestions:
    """The questions that wait in the host, on their way to the thread that waits in a cell or terminal.

    Several clients may ask the same question at once. The first answer counts, and the other prompts end. `request`
    calls a function of the host.
    """

    def __init__(self, request: Callable[..., object]) -> None:
        self._request = request
        self._pending: tuple[PendingQuestion, ...] = ()
        self._answered: set[int] = set()
        """Keys of the questions that were answered here; the host may not have confirmed it yet."""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
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
            if question is None:
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=patience)
                question = self._next()
            if question is not None:
                self._ask(question)
        except KeyboardInterrupt:
            if not self._has_withdrawn:
                raise
            self._has_withdrawn = False

    def _next(self) -> PendingQuestion | None:
        new = (question for question in self._pending if question.key not in self._answered)
        return None if self._has_given_up else next(new, None)

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
            self._request("answer", question.key, text)
