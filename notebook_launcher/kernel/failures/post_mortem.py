"""Opens a debugger in a rank of a session whose last call failed, and answers its prompt in the cell.

The rank serves the debugger between two calls, so no run is under way: a thread of its own reads the events of the
process tree, as a run's thread does, and the calling thread answers the prompt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from notebook_launcher.config import LaunchConfig
from notebook_launcher.engines.engine import FromRank, Output, RankLost, SupervisorLost
from notebook_launcher.errors import CallOrderError, check_rank
from notebook_launcher.ipython_shell import running_shell
from notebook_launcher.kernel.display.output import RunOutput
from notebook_launcher.kernel.display.questions import Question, Questions, why_no_answers
from notebook_launcher.kernel.latch import AWAKE_EVERY, Latch
from notebook_launcher.messaging import messages
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from notebook_launcher.engines.engine import Event
    from notebook_launcher.kernel.display.questions import Answer
    from notebook_launcher.kernel.display.sink import Sink
    from notebook_launcher.kernel.hosting import TakesQuestions
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.data import RunData


def frames_to_debug(data: RunData | None, rank: int | None, *, has_forgotten: bool) -> tuple[RunData, int]:
    """Return the run and the rank to look into: the rank that is named, else the culprit of the run.

    Raises:
        CallOrderError: No run has failed, or the rank keeps no frames; the message gives the reason.
        NoSuchRankError: The session has no such rank.
    """
    if data is None or data.attempt is None or data.outcome is None:
        raise CallOrderError("session.debug() looks into a run that has failed, and this session has had no run yet.")
    outcomes = data.attempt.state.outcomes
    kept = [at for at, outcome in sorted(outcomes.items()) if outcome.raised is not None and outcome.exited is None]
    others = f" Frames are kept by {rank_list(kept)}: session.debug({kept[0]})." if kept else ""
    if rank is None:
        rank = getattr(data.outcome.error, "rank", None)
        if rank is None:
            words = "was stopped" if data.outcome.error is not None else "has returned on every rank"
            raise CallOrderError(f"the last run, {data.name}, {words}: no rank is to blame for it.{others}")
    check_rank(rank, data.plan.num_processes, "session")
    if rank not in kept:
        has_returned = rank in outcomes and outcomes[rank].returned is not None
        words = "returned" if has_returned else "died, and its frames with it"
        raise CallOrderError(f"rank {rank} {words}: there is nothing to look into.{others}")
    if has_forgotten:
        raise CallOrderError("session.forget() has released the frames of the last run: there is nothing to look into.")
    return data, rank


class PostMortem:
    """One debugger in one rank, which runs no call, from its first prompt to its end; `data` are its failed run's."""

    def __init__(self, ranks: Ranks, data: RunData, rank: int, sink: Sink) -> None:
        self._ranks = ranks
        self._data = data
        self._rank = rank
        self._over: Latch[None] = Latch()
        """Set once the debugger has ended."""
        self._questions: TakesQuestions | None = None
        """Takes the prompts; None before the debugger is opened."""
        # One rank: the prompt names it, so its lines need no label.
        self._output = RunOutput(sink, LaunchConfig(display="all", monitor=False, runs_folder=None), 1)
        self._thread: threading.Thread | None = None
        """The thread that reads the rank's events."""
        self._claim = threading.Lock()
        """Held by the first thread that was started, since `_begin` may be called again after an interrupt."""
        self._open_question: messages.InputRequest | None = None
        """The question that waits for an answer."""
        self._is_left = False
        """True once the user has left by an interrupt: no further question is asked."""
        self._fault: BaseException | None = None
        """The exception that ended the thread, which the caller raises."""

    def run(self) -> None:
        """Answer the debugger's prompt until the user leaves it.

        Raises:
            KeyboardInterrupt: The user left by an interrupt.
            CallOrderError: The rank died.
        """
        self._questions = questions = Questions(self._over)
        questions.answer_all(self._begin, self.reply, self.interrupt)
        if self._thread is not None:
            self._thread.join()
        self._conclude()

    def serve(self, questions: TakesQuestions) -> None:
        """Let clients of a host answer the prompt until one of them leaves the debugger; raises as `run` does."""
        self._questions = questions
        self._listen()
        self._conclude()

    def _conclude(self) -> None:
        self._output.close()
        if self._fault is not None:
            raise self._fault
        if self._is_left:
            raise KeyboardInterrupt(f"left the debugger of rank {self._rank}")

    def _begin(self) -> None:
        if self._thread is None:
            threading.Thread(target=self._listen, name="notebook-launcher debugger", daemon=True).start()

    def waits_for(self, question: Question) -> bool:
        """Return True if the rank still waits for the answer to this question."""
        return question.request is self._open_question

    def reply(self, answer: Answer) -> None:
        """Pass an answer on to the rank."""
        self._open_question = None
        if self._ranks.tree is not None:
            self._ranks.tree.send(self._rank, answer.reply)

    def interrupt(self, again: bool) -> None:  # as `Questions.answer_all` calls it
        """Leave the debugger at its prompt, or end the command that runs in it; `again`: end the rank."""
        tree, question = self._ranks.tree, self._open_question
        if tree is None:
            return
        if question is not None:
            # At the prompt an interrupt leaves the debugger.
            self._is_left, self._open_question = True, None
            tree.send(self._rank, messages.InputReply(text=None, reason="interrupted", number=question.number))
        else:
            # It ends the command that runs, and the prompt comes back; a second one ends the rank.
            tree.signal((self._rank,), signal.SIGKILL if again else signal.SIGINT)

    def _listen(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            tree = self._ranks.tree
            assert tree is not None
            tree.send(self._rank, messages.DebugFailure())
            is_open = True
            while is_open:
                for event in tree.events(AWAKE_EVERY):
                    is_open = self._handle(event) and is_open
                self._output.publish()
        except BaseException as fault:  # raised again in the cell
            self._fault = fault
        finally:
            self._over.set(None)

    def _handle(self, event: Event) -> bool:
        """Carry out an event; return False if the debugger has ended."""
        match event:
            case Output(rank) if rank == self._rank:
                self._output.console.feed(0, event.stream, event.data)
            case Output():
                self._data.output.show_late_output([event])
            case FromRank(rank, messages.InputRequest() as request, _) if rank == self._rank:
                self._ask(request)
            case FromRank(rank, messages.Display() | messages.ClearOutput() as record, _):
                self._output.show(rank, record)
            case FromRank(rank, messages.DebugEnded(), _) if rank == self._rank:
                return False
            case FromRank(_, _, fds):
                for fd in fds:
                    os.close(fd)
            case RankLost(exited):
                self._replace(exited)
                return exited.rank != self._rank
            case SupervisorLost():
                self._ranks.close()
                self._fault = CallOrderError("the session's ranks died; the next run starts them again.")
                return False
        return True

    def _ask(self, request: messages.InputRequest) -> None:
        assert self._ranks.tree is not None
        assert self._questions is not None
        if self._is_left:
            reply = messages.InputReply(text=None, reason="interrupted", number=request.number)
            self._ranks.tree.send(self._rank, reply)
            return
        self._output.publish(force=True)
        self._output.sink.flush()
        self._open_question = request
        self._questions.put(Question(self._rank, request, 0))

    def _replace(self, exited: messages.RankExited) -> None:
        self._ranks.replace([exited.rank])
        if exited.rank == self._rank:
            msg = f"rank {exited.rank} died in the debugger. It is started again with the next run."
            self._fault = CallOrderError(msg)


# --------------------------------------------------------------------------------------------------------------------
# IPython's `%debug`, for the exception of a run: opens the debugger in the rank that failed.
#
# The exception's own frames are in the rank, so the kernel's frames, which `%debug` would show, are of no use. The
# magic is replaced while a session is open, and passes everything else on to IPython's own.


class DebugMagic:
    """A `%debug` that a session installs, and removes when it is closed.

    `debug` opens the debugger if the exception belongs to the session's last run, and else returns False.
    """

    def __init__(self, debug: weakref.WeakMethod[Callable[[BaseException], bool]]) -> None:
        self._debug = debug
        self._is_removed = False
        self._table: dict[str, Any] | None = None
        """IPython's line magics; None while this magic is not installed."""
        self._original: Any = None

    def install(self) -> None:
        """Take the place of `%debug`, if there is an IPython; idempotent.

        IPython loads its own `%debug` for this (15 ms, once), so that it does not take this one's place later.
        """
        shell = running_shell()
        if self._table is not None or self._is_removed or shell is None:
            return
        original = shell.find_line_magic("debug")
        if original is not None:
            self._table, self._original = shell.magics_manager.magics["line"], original
            self._table["debug"] = self

    def remove(self) -> None:
        """Put the original back; idempotent."""
        self._is_removed = True
        table, self._table = self._table, None
        if table is not None and table.get("debug") is self:
            original = self._original
            while isinstance(original, DebugMagic) and original._is_removed:  # noqa: SLF001
                original = original._original  # noqa: SLF001 - of a session that was closed before this one
            table["debug"] = original

    def __call__(self, line: str = "", *args: Any, **options: Any) -> Any:
        """Debug the last exception, as `%debug` does."""
        error = getattr(sys, "last_value", None)
        debug = None if self._is_removed or line.strip() else self._debug()
        if debug is not None and error is not None and debug(error):
            return None
        return self._original(line, *args, **options)


# --------------------------------------------------------------------------------------------------------------------
# The condition of every debugger: a user who can answer its prompt.


def check_answers(what: str, *, in_cell: bool = True) -> None:
    """Raise `CallOrderError` if no user can answer a prompt; `what` opens the debugger, as the user typed it."""
    reason = why_no_answers()
    if not in_cell:
        reason = "a run in the background has no cell that waits. Use notebook_launch(...) or session.run(...)"
    elif threading.current_thread() is not threading.main_thread():
        reason = "it was called in a thread, and only the main thread can ask. Call it in a cell"
    if reason:
        raise CallOrderError(f"{what} opens a debugger, whose prompt must be answered: {reason}.")
