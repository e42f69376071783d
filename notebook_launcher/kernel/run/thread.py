"""The thread of one run, which alone writes the run data."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from notebook_launcher.engines.board import LiveRecords
from notebook_launcher.engines.engine import FromRank, Output, RankLost
from notebook_launcher.errors import ResourceError
from notebook_launcher.kernel.display.output import error_line
from notebook_launcher.kernel.display.questions import Question
from notebook_launcher.kernel.inspection.inspector import RankInspector
from notebook_launcher.kernel.inspection.profiles import ProfileRequests
from notebook_launcher.kernel.latch import can_hold_interrupts, held_interrupts
from notebook_launcher.kernel.run.attempt import Attempt
from notebook_launcher.kernel.run.commands import CommandHandler
from notebook_launcher.kernel.run.conclusion import (
    close_ranks,
    describe_failure,
    end_ranks,
    mend,
    replace_the_dead,
    restart,
)
from notebook_launcher.kernel.run.live_values import LiveRecord, describe_change
from notebook_launcher.kernel.run.snapshots import ProgressLine
from notebook_launcher.messaging import messages
from notebook_launcher.wording import describe_process_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from notebook_launcher.engines.engine import Event
    from notebook_launcher.history.recorder import Recorder
    from notebook_launcher.kernel.calls.call_scope import OutgoingCall
    from notebook_launcher.kernel.hosting import Hosting
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.call_state import RankOutcome
    from notebook_launcher.kernel.run.commands import Command
    from notebook_launcher.kernel.run.conduct import RunConduct
    from notebook_launcher.kernel.run.data import RunData


FIRST_MOMENTS = 0.02
"""Seconds for which a thread that waits for a run carries it out by itself; meanwhile, interrupts are held back."""


class RunThread:
    """Has a run carried out in a thread of its own, and takes commands to that thread.

    Args:
        conduct: The run, which has not begun.
    """

    def __init__(self, conduct: RunConduct) -> None:
        self.data = conduct.data
        """All that is known of the run."""
        self._ranks = conduct.ranks
        self._conduct: RunConduct | None = conduct
        """The run that is to be carried out; None once it is over, which closes its files and frees the function."""
        self._claim = threading.Lock()
        """Held by the thread that carries the run out: `begin` may start another one after an interrupt."""
        self._thread: threading.Thread | None = None
        """The thread, once it runs."""

    def make_folder(self) -> Path:
        """Make the folder of a run that has not begun (`RunConduct.make_folder`); raises `OSError`."""
        assert self._conduct is not None
        return self._conduct.make_folder()

    def begin(self) -> None:
        """Start the run's thread; call it again after an interrupt, which may have prevented the start.

        Raises:
            ResourceError: There is no room for a thread. The ranks are gone.
        """
        if self._thread is not None or self.data.over.is_set:
            return
        try:
            _Thread(self).start()
        except RuntimeError as error:
            failure = _no_thread(error)
            self._give_up(failure)
            raise failure from error

    def begin_in_cell(self) -> None:
        """Begin the run for a thread that waits for it; may be called again after an interrupt, as `begin`.

        The waiting thread carries out by itself what ends within moments, because it would have to be woken: a call of
        a session takes 1.15 ms then, and 1.6 with a thread. A longer run goes on in its thread, and so does one that
        fails. If there is no room for a thread then, the run ends with that error.

        Raises:
            ResourceError: There is no room for a thread from the beginning. The ranks are gone.
        """
        if not (self._ranks.have_served and can_hold_interrupts()):
            self.begin()
            return
        with held_interrupts():
            if self._thread is not None:
                return
            with self._claimed() as conduct:
                if conduct is None or conduct.is_over_within(FIRST_MOMENTS):
                    return
            try:
                _Thread(self).start()
            except RuntimeError as error:
                self._give_up(_no_thread(error))

    def carry_out(self) -> None:
        """Carry out the run, or the rest of it, in this thread."""
        with self._claimed() as conduct:
            if conduct is not None:
                self._thread = threading.current_thread()
                conduct.carry_out()

    def _give_up(self, failure: ResourceError) -> None:
        with self._claimed() as conduct:
            if conduct is not None:
                conduct.give_up(failure)

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[RunConduct | None]:
        """Yield the run for this thread alone; None if it is over, or another thread carries it out."""
        if not self._claim.acquire(blocking=False):
            yield None
            return
        try:
            yield self._conduct
        finally:
            if self.data.over.is_set:
                self._conduct = None
            self._claim.release()

    def join(self) -> None:
        """Wait until the thread of a run that is over has ended, too."""
        if self._thread is not None:
            self._thread.join()

    def command(self, command: Command) -> None:
        """Send a command to the thread; from any thread. A command that comes after the end is refused."""
        self.data.commands.put(command)
        self._ranks.wake()

    def waits_for(self, question: Question) -> bool:
        """Return True if the rank that asked a question still waits for its answer."""
        attempt = self.data.attempt
        return attempt is not None and attempt.call_id == question.call_id and question.rank in self.data.asking


class _Thread(threading.Thread):
    """The thread of a run; it refers to the run only while the run goes on."""

    def __init__(self, subject: RunThread) -> None:
        super().__init__(name=f"notebook-launcher {subject.data.name}", daemon=True)
        self.subject: RunThread | None = subject

    def run(self) -> None:
        assert self.subject is not None
        try:
            self.subject.carry_out()
        finally:
            self.subject = None


def _no_thread(error: RuntimeError) -> ResourceError:
    """Return the error of a run whose thread could not be started."""
    return ResourceError(
        errno.EAGAIN,
        f"the run's thread could not be started: {error}. {describe_process_limit(for_threads=True)}",
    )


def live_threads() -> list[RunThread]:
    """Return the runs in progress in this process, in no order: the interpreter's list of threads has them."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    return [subject for thread in threads if (subject := thread.subject) is not None]


# --------------------------------------------------------------------------------------------------------------------
# The loop of a run's thread: waits for events of the process tree and for commands, and writes the run data.


T = TypeVar("T")
Steps = Generator[None, "float | None", T]
"""Work in steps, which one thread may begin and another continue: stops before each wait, and takes the seconds for
which to wait at most; None: no limit. Returns a value at the end."""


class RunLoop:
    """Carries out the attempts at one call, in one thread at a time.

    Args:
        data: The run data, which the loop writes.
        ranks: The ranks that serve the run.
        call: The call. Ranks that are started again may need it once more: forked ranks inherit it, and the fork server
            reads its code.
        hosting: Takes what ranks ask the user.
        recorder: Writes the run's folder.
    """

    def __init__(
        self,
        data: RunData,
        ranks: Ranks,
        call: OutgoingCall,
        hosting: Hosting,
        recorder: Recorder,
    ) -> None:
        self._data = data
        self._ranks = ranks
        self._call = call
        self._hosting = hosting
        self._recorder = recorder
        self._progress = ProgressLine(data)
        self._has_live = False
        """True if ranks have reported since the line of progress was updated."""
        self._inspector = RankInspector(data)
        self._profiles = ProfileRequests(recorder)
        self._commands = CommandHandler(data, self._inspector, self._profiles)
        self._periodic = self._make_periodic()

    def _make_periodic(self) -> tuple[Periodic, ...]:
        """Return the parts that have work between events, in the order in which they do it."""
        data, comms, inspector, recorder = self._data, self._ranks.comms, self._inspector, self._recorder
        return (
            # Without `self`, which would make a cycle: a run's files are closed when the run is forgotten.
            Periodic(inspector.next_due, lambda _, attempt: _watch(data, inspector, attempt)),
            Periodic(data.output.next_due, lambda *_: data.output.publish()),
            Periodic(comms.next_due, lambda now, attempt: comms.tick(now, attempt.tree)),
            Periodic(data.usage.next_due, lambda now, attempt: data.usage.tick(now, attempt.tree, data.gpus)),
            Periodic(recorder.next_due, lambda now, _: recorder.tick(now)),
        )

    def run(self) -> Steps[None]:
        """Repeat the call until an attempt succeeds, is stopped, or no restart is left."""
        with self._ranks.comms.served(self._ranks.wake):
            yield from self._repeat()

    def _repeat(self) -> Steps[None]:
        data, limit = self._data, self._data.plan.config.max_restarts
        may_start_silently = True
        while True:
            attempt = yield from self._run_attempt()
            has_begun = bool(attempt.state.started) or attempt.ladder is not None
            if attempt.state.tree_lost and not has_begun and may_start_silently:
                # The fork server, or an idle session's supervisor, died unnoticed before this run.
                may_start_silently = False
                attempt.state.close()
                if self._ranks.many_calls:
                    data.output.notice("the session's ranks had died and were restarted")
                self._ranks.start(self._call.call)
                continue
            if not attempt.state.failed or data.restarts >= limit or data.commands.asked_to_stop or attempt.timed_out:
                return
            data.restarts += 1
            data.output.notice(
                f"{data.name}: attempt {data.restarts} {describe_failure(data)}; "
                f"starting again ({data.restarts} of {limit} restarts)"
            )
            attempt.state.close()
            restart(data, self._ranks, self._call.call)

    def _run_attempt(self) -> Steps[Attempt]:
        attempt = self._new_attempt()
        if self._ranks.many_calls:
            replace_the_dead(self._data, self._ranks, attempt, partial(self._handle, attempt=attempt))
        attempt.begin()
        while not attempt.settled:
            self._commands.carry_out_all(attempt)
            longest = yield
            self._handle_all(attempt.tree.events(self._patience(attempt, longest)), attempt)
            if self._has_live:
                self._has_live = False
                attempt.note_activity()
                self._progress.update()
            self._commands.carry_out_all(attempt)
            if (failure := attempt.failure_to_debug()) is not None:
                self._debug(failure, attempt)
            attempt.act(lambda: self._data.note_stacks(self._inspector.read_stacks(attempt)))
            for part in self._periodic:
                part.tick(time.monotonic(), attempt)
        self._inspector.forget_hang()
        self._data.hang = None
        if attempt.state.failed:
            yield  # To mend a session takes up to a second.
        self._settle(attempt)
        return attempt

    def _new_attempt(self) -> Attempt:
        data, tree = self._data, self._ranks.tree
        assert tree is not None
        config = data.plan.config
        run_call = self._ranks.next_call(
            data.scope,
            restart_count=data.restarts,
            can_ask=self._hosting.can_ask,
            widget_ranks=data.output.choose_widget_ranks(data.scope.widget_ranks),
            checkpoints=tuple(data.checkpoints),
        )
        deadline = None if config.timeout is None else data.launched + config.timeout
        attempt = Attempt(
            tree,
            run_call,
            self._call.fds,
            deadline=deadline,
            idle_timeout=config.idle_timeout,
            debug=config.debug,
        )
        data.begin_attempt(attempt)
        self._profiles.give_up()
        data.live.settings.forget()  # Ranks that were started again have their first ones.
        self._inspector.begin()
        return attempt

    def _patience(self, attempt: Attempt, longest: float | None) -> float | None:
        """Return the seconds until something is due even if nothing happens, at most `longest`; None: nothing is."""
        now, deadline = time.monotonic(), attempt.next_deadline()
        waits = [part.next_due(now) for part in self._periodic]
        waits += [longest, None if deadline is None else max(0.0, deadline - now)]
        return min((wait for wait in waits if wait is not None), default=None)

    def _settle(self, attempt: Attempt) -> None:
        """End the processes, or make them ready for the next call."""
        for rank in range(self._data.plan.num_processes):
            for event in attempt.tree.drain(rank):
                self._handle(event, attempt)
        self._ranks.comms.publish(None)
        if attempt.state.tree_lost:
            close_ranks(self._data, self._ranks, attempt)
        elif self._ranks.many_calls:
            mend(self._data, self._ranks, attempt, partial(self._handle, attempt=attempt))
        else:
            end_ranks(self._data, self._ranks, attempt, partial(self._handle, attempt=attempt))

    def _handle_all(self, events: list[Event], attempt: Attempt) -> None:
        """Handle events in order; after one that shows a fault of this package, close the descriptors of the rest."""
        rest = iter(events)
        try:
            for event in rest:
                self._handle(event, attempt)
        finally:
            for event in rest:
                if isinstance(event, FromRank):
                    event.close()

    def _handle(self, event: Event, attempt: Attempt) -> None:
        match event:
            case LiveRecords():
                self._data.live.fold_all(event)
                self._note_live()
                return
            case FromRank(rank, record, _) if isinstance(record, LiveRecord):
                self._data.live.fold(rank, record)
                self._note_live()
                return
            case Output():
                self._data.output.feed(event)
                self._recorder.note()
            case FromRank(rank, messages.DebugEnded(), _) | RankLost(messages.RankExited(rank=rank)):
                attempt.end_debugging(rank)
            case FromRank(_, messages.CallStarted() | messages.Returned() | messages.Raised(), _):
                pass  # `Attempt.fold` takes them.
            case FromRank(rank, record, _):
                self._show_or_note(rank, record, attempt)
        attempt.fold(event)

    def _note_live(self) -> None:
        self._has_live = True
        self._recorder.note()

    def _show_or_note(self, rank: int, record: object, attempt: Attempt) -> None:  # noqa: C901 - one branch a message
        """Show, pass on or note a record of a rank that is not about the call itself.

        Raises:
            TypeError: The record is unknown, which is a fault of this package.
        """
        data = self._data
        match record:
            case messages.Display() | messages.ClearOutput():
                self._ranks.comms.publish(None)
                data.output.show(rank, record)
            case messages.CommMessage() | messages.CommHandled():
                self._ranks.comms.take(rank, record, data.output.sink)
            case messages.InputRequest():
                self._ask(rank, record, attempt)
            case messages.Notice(text=text, once=once):
                if data.is_new(once):
                    data.output.notice(text)
                    data.note_notice(text)
            case messages.CheckpointSaved(folder=folder):
                data.note_checkpoint(folder)
            case messages.Offered(name=name, value=value):
                data.live.settings.offer(name, value)
            case messages.TrainerMade():
                data.live.settings.note_trainer(record)
            case messages.Changed():
                self._note_change(record, attempt)
            case messages.Profiled():
                self._profiles.note(record)
            case messages.Unreadable(reason=reason):
                data.output.notice(f"rank {rank} sent a record that the kernel could not unpickle ({reason})", "stderr")
            case _:
                raise TypeError(f"the kernel got an unknown message from rank {rank}: {record!r}")

    def _note_change(self, record: messages.Changed, attempt: Attempt) -> None:
        self._data.live.note_change(record)
        attempt.note_change(record)
        if line := describe_change(record):
            self._data.output.notice(line)
        self._recorder.note()

    def _debug(self, failure: RankOutcome, attempt: Attempt) -> None:
        """Let the user look into the frames of the rank that failed first, before the others are stopped."""
        rank = failure.rank
        if failure.raised is None or failure.exited is not None:
            self._data.output.notice(f"debug=True: the process of rank {rank} has ended; no frames are left to debug")
            return
        error = error_line(failure.raised.report)
        self._data.output.notice(f"rank {rank} failed: {error}. The other ranks stay as they are; q ends the run.")
        self._data.output.show_rank(rank)
        attempt.begin_debugging(rank)

    def _ask(self, rank: int, request: messages.InputRequest, attempt: Attempt) -> None:
        if rank == attempt.state.debugged and attempt.ladder is not None:
            # The run is being stopped, so the debugger ends.
            reply = messages.InputReply(text=None, reason="the run was stopped", number=request.number)
            attempt.tree.send(rank, reply)
            return
        self._data.note_question(rank)
        attempt.hold_clock()
        self._data.output.publish(force=True)
        self._hosting.questions.put(Question(rank, request, attempt.call_id))


def _watch(data: RunData, inspector: RankInspector, attempt: Attempt) -> None:
    """Look for ranks that wait in a collective which others have not entered, if a look is due."""
    line = inspector.watch(attempt)
    data.hang = inspector.hang
    if line:
        data.output.notice(line)


# --------------------------------------------------------------------------------------------------------------------
# Parts of a run that have work of their own at certain times, and not only when something happens.


class Periodic(NamedTuple):
    """A part of a run that the run's thread drives, as two functions of the time and, for its work, of the attempt."""

    next_due: Callable[[float], float | None]
    """Returns the seconds until `tick` has something to do; None: nothing, unless an event comes."""
    tick: Callable[[float, Attempt], object]
    """Does what is due; takes the time, by `time.monotonic()`."""
