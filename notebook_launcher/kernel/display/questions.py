"""Questions of ranks (`input()`, `breakpoint()`), answered by the main thread alone, while it waits in a cell."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import queue
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.latch import AWAKE_EVERY, Latch
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable


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
    """The questions of one run or debugger, on their way to the thread that waits in the cell until it is over."""

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
        """Answer questions until the run is over, and return True if there was an interrupt.

        `begin` begins the run, again after an interrupt, which may have cut it short. `reply` gets the answers. `stop`
        is called at each interrupt, with True if there was one before. `idle` is called at once, and again within the
        seconds that it returns.
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


# --------------------------------------------------------------------------------------------------------------------
# A question to the user by the front end of the running cell, or by the terminal.


CANNOT_ASK = "this front end cannot ask for input (nbclient, papermill and nbconvert never can)"
READER = "NOTEBOOK_LAUNCHER_READER"
"""Environment variable with the reader of cells: `agent` where requests allow input that nobody gives, `person` where
that is taken for an agent, and `file` for a program that runs a notebook whose output is to be kept whole."""

BY_PYTHON = re.compile(r"_\d+_\d+$")
"""End of the names of messages that jupyter_client sends: its process and a number. Pages send UUIDs alone."""
OF_SERVER = re.compile(r"kernel-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.json$")
"""Connection files of kernels that a Jupyter server has started; consoles and Spyder name them otherwise."""

Reader = Literal["person", "viewer", "agent", "file"]
"""The reader of a cell. `"viewer"`: a person whose front end cannot ask. `"agent"`: a program that cannot answer, and
acts on what the cell shows, so that this is short. `"file"`: nobody looks now; a notebook keeps all of its output."""


def reader_of(message: Any) -> Reader:
    """Return who reads the cell that a message has started.

    Front ends state in each request that input is possible. Programs that run notebooks (nbclient, papermill,
    nbconvert, servers for agents) state that it is not.
    """
    named, message = os.environ.get(READER), message or {}
    may_ask = message.get("content", {}).get("allow_stdin", True)
    if may_ask and (named in {"person", "file"} or not (named == "agent" or _is_sent_by_program(message))):
        return "person"
    readers: dict[str | None, Reader] = {"person": "viewer", "file": "file"}
    return readers.get(named, "agent")


def _is_sent_by_program(message: Any) -> bool:
    """Return True for a request of a client in Python to a kernel of a Jupyter server, whose front ends are pages.

    jupyter-mcp-server 2.2 allows input, which it would read from its own client's requests.
    """
    number = str(message.get("header", {}).get("msg_id", ""))
    shell = kernel_shell()
    file = getattr(getattr(getattr(shell, "kernel", None), "parent", None), "connection_file", "")
    return bool(BY_PYTHON.search(number) and OF_SERVER.search(str(file)))


def ask(prompt: str, *, password: bool = False) -> str:
    """Ask the user; call it in the kernel's main thread.

    Raises:
        EOFError: The user cannot be asked here; the message gives the reason.
    """
    if why := why_no_answers():
        raise _no_answer(prompt, why)
    try:
        return getpass.getpass(prompt) if password else input(prompt)
    except (EOFError, OSError, RuntimeError) as error:  # IPython's StdinNotImplementedError is a RuntimeError
        raise _no_answer(prompt, "standard input has ended" if isinstance(error, EOFError) else CANNOT_ASK) from error


def _no_answer(prompt: str, reason: str) -> EOFError:
    hint = (
        'Switch breakpoints off with env={"PYTHONBREAKPOINT": "0"}.'
        if prompt.endswith(" pdb) ")
        else "Pass the value to the function as an argument instead."
    )
    return EOFError(f"no answer to {prompt!r}: {reason}. {hint}")


def why_no_answers() -> str:
    """Return the reason why `ask` cannot be answered in the running cell, as a clause; empty if it may be."""
    shell = kernel_shell()
    if shell is None:
        return "standard input is closed" if sys.stdin is None or sys.stdin.closed else ""
    return "" if reader_of(shell.kernel.get_parent("shell")) == "person" else CANNOT_ASK
