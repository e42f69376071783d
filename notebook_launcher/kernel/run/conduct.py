"""The conduct of one run: the threads that drive it, its loop and its end."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import threading
import time
import weakref
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from notebook_launcher.engines.board import LiveRecords
from notebook_launcher.engines.engine import FromRank, Output, RankLost
from notebook_launcher.errors import ResourceError
from notebook_launcher.history.recorder import Recorder
from notebook_launcher.history.run_folders import RANDOM
from notebook_launcher.history.summaries import progress_line
from notebook_launcher.kernel.display.output import error_line
from notebook_launcher.kernel.display.questions import Answer, Question
from notebook_launcher.kernel.failures.failure_display import end_line
from notebook_launcher.kernel.inspection.hangs import HangWatch, suggestion
from notebook_launcher.kernel.inspection.profiles import ProfileRequests
from notebook_launcher.kernel.inspection.stacks import Stacks
from notebook_launcher.kernel.latch import can_hold_interrupts, held_interrupts
from notebook_launcher.kernel.run import conclusion
from notebook_launcher.kernel.run.attempt import Attempt
from notebook_launcher.kernel.run.commands import Inquiry, StopCommand
from notebook_launcher.kernel.run.data import RunData
from notebook_launcher.kernel.run.live_values import LiveRecord, describe_change
from notebook_launcher.kernel.run.snapshots import QUIET, LiveRunReader, take_rank_snapshots
from notebook_launcher.messaging import messages
from notebook_launcher.travel.random_states import encode_states
from notebook_launcher.wording import describe_process_limit, rank_list

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.engines.engine import Event
    from notebook_launcher.kernel.calls.call_scope import CallScope, OutgoingCall
    from notebook_launcher.kernel.calls.origin import Origin
    from notebook_launcher.kernel.hosting import Hosting
    from notebook_launcher.kernel.latch import Latch
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.call_state import RankOutcome
    from notebook_launcher.kernel.run.commands import Command
    from notebook_launcher.kernel.run.conclusion import RunOutcome


PROGRESS_EVERY = 0.5
"""Seconds between two lines of progress."""
FIRST_MOMENTS = 0.02
"""Seconds for which a thread that waits for a run carries it out by itself; meanwhile, interrupts are held back."""

T = TypeVar("T")
Steps = Generator[None, "float | None", T]
"""Work in steps, which one thread may begin and another continue: stops before each wait, and takes the seconds for
which to wait at most; None: no limit. Returns a value at the end."""


class RunConduct:
    """Carries a run out, in a thread of its own or the one that waits for it, and concludes it.

    One thread at a time carries it out, and alone writes the run data. At the end, it closes the call, and the ranks
    unless they stay for further calls. The launch began at the time `began`, by `time.monotonic()`; None: now.
    """

    def __init__(
        self,
        ranks: Ranks,
        call: OutgoingCall,
        scope: CallScope,
        hosting: Hosting,
        over: Latch[None],
        began: float | None = None,
    ) -> None:
        self.data = data = RunData.of_call(ranks.plan, scope, hosting, over, in_session=ranks.many_calls, began=began)
        self.ranks = ranks
        self._call = call
        self._hosting = hosting
        self._recorder = Recorder(
            LiveRunReader(data),
            None if scope.is_widget_call else data.plan.config.runs_folder,
            data.launched,
            data.output.warn,
            origin=partial(_begin_folder, data, hosting),
        )
        self._hangs = HangWatch(None)
        """Replaced at each attempt, since an attempt begins with nothing known of its ranks."""
        self.profiles = ProfileRequests(self._recorder)
        self._progress_due = data.launched + QUIET
        self._has_live = False
        """True if ranks have reported since the line of progress was updated."""
        self._steps: Steps[None] | None = None
        """The rest of the run, once it has begun: until then nothing else may keep this object from being forgotten."""
        self._forgotten = weakref.finalize(self, (lambda: None) if ranks.many_calls else ranks.close)
        """Closes the ranks when this object is forgotten, in case an interrupt prevents the run from beginning."""
        self._forgotten.atexit = False
        self._claim = threading.Lock()
        """Held by the thread that carries the run out: `begin` may start another one after an interrupt."""
        self._thread: threading.Thread | None = None
        """The run's own thread, once it carries the run out."""

    def announce(self) -> None:
        """Show the run's first lines: ranks and devices, and notices about what the call takes along."""
        data, call = self.data, self._call
        first = "" if self.ranks.is_announced else f"{data.name}: {data.plan.summary}"
        self.ranks.is_announced = True
        if lines := "\n".join(filter(None, (first, call.describe_copies(data.plan.num_processes)))):
            data.output.first_lines(lines)
        replaced, left = call.describe_replacements()
        if replaced:
            data.output.headline(replaced)
        if left:
            data.output.notice(left)
        if stale := call.stale_modules():
            forked = data.plan.config.start_method == "fork"
            version = "ranks are forked from it and run it as it was" if forked else "ranks run the file as it is now"
            data.output.notice(f"{', '.join(stale)} changed since the kernel imported it: {version}")

    def make_folder(self) -> Path:
        """Make the run's folder now, and not only after a second; return it.

        The folder of a session's call stays empty until the call is found worth recording.

        Raises:
            OSError: The folder cannot be made.
        """
        return self._recorder.reserve_folder() if self.ranks.many_calls else self._recorder.make_folder()

    # ----------------------------------------------------------------------------------------------------------------
    # Who carries the run out.

    def begin(self) -> None:
        """Start the run's thread; call it again after an interrupt, which may have prevented the start.

        Raises:
            ResourceError: There is no room for a thread. The ranks are gone.
        """
        if self._thread is None and not self.data.over.is_set and (failure := self._start_thread()) is not None:
            raise failure

    def begin_in_cell(self) -> None:
        """Begin the run for a thread that waits for it; may be called again after an interrupt, as `begin`.

        The waiting thread carries out by itself what ends within moments, because it would have to be woken: a call of
        a session takes 1.15 ms then, and 1.6 with a thread. A longer run goes on in its thread, and so does one that
        fails. If there is no room for a thread then, the run ends with that error.

        Raises:
            ResourceError: There is no room for a thread from the beginning. The ranks are gone.
        """
        if not (self.ranks.have_served and can_hold_interrupts()):
            self.begin()
            return
        with held_interrupts():
            if self._thread is None and not self.carry_out(FIRST_MOMENTS):
                self._start_thread()

    def _start_thread(self) -> ResourceError | None:
        """Start the run's thread; if there is no room for one, end the run with the error, and return it."""
        try:
            RunThread(self).start()
        except RuntimeError as error:
            limit = describe_process_limit(for_threads=True)
            failure = ResourceError(errno.EAGAIN, f"the run's thread could not be started: {error}. {limit}")
            failure.__cause__ = error
            self.carry_out(failure=failure)
            return failure
        return None

    def carry_out(self, seconds: float = math.inf, failure: Exception | None = None) -> bool:
        """Carry out the run, or the rest of it, in this thread; return False if some of it is left.

        With a limit of seconds, only until it fails. With a failure the run ends at once, whether it has begun or not.
        """
        if not self._claim.acquire(blocking=False):
            return True  # Another thread carries it out.
        data, end = self.data, time.monotonic() + seconds
        try:
            if data.over.is_set:
                return True
            if self._steps is None:
                self._steps = self._carry_out_in_steps()
                next(self._steps)  # A generator takes no value before it has stopped once.
            if failure is not None:
                self._steps.throw(failure)
            if seconds == math.inf:
                self._thread = threading.current_thread()
                while True:
                    next(self._steps)
            while (left := end - time.monotonic()) > 0 and not (data.attempt is not None and data.attempt.state.failed):
                self._steps.send(left)
        except StopIteration:
            return True
        finally:
            self._claim.release()
        return False

    def join(self) -> None:
        """Wait until the thread of a run that is over has ended, too."""
        if self._thread is not None:
            self._thread.join()

    def command(self, command: Command) -> None:
        """Send a command to the thread; from any thread. A command that comes after the end is refused."""
        self.data.commands.put(command)
        self.ranks.wake()

    def waits_for(self, question: Question) -> bool:
        """Return True if the rank that asked a question still waits for its answer."""
        attempt = self.data.attempt
        return attempt is not None and attempt.call_id == question.call_id and question.rank in self.data.asking

    def _carry_out_in_steps(self) -> Steps[None]:
        try:
            yield
            with self.ranks.comms.served(self.ranks.wake):
                yield from self._repeat()
            outcome = conclusion.conclude(self.data, self._settle_folder, self._hosting)
            unsent = outcome.results.unsent
            for reason in dict.fromkeys(unsent.values()):
                ranks = rank_list(rank for rank in unsent if unsent[rank] == reason)
                self.data.output.notice(f"{ranks}: {reason} Everything else of the run is available.", "stderr")
        except BaseException as fault:  # our own fault must reach the cell, not vanish with the thread
            outcome = self._fail(fault)
        self._finish(outcome)

    def _settle_folder(self, failed: bool) -> Path | None:
        return self._recorder.settle(failed=failed, is_brief=self.data.scope.is_brief)

    def _fail(self, fault: BaseException) -> RunOutcome:
        with contextlib.suppress(Exception):
            self.ranks.close()
        if self.data.attempt is not None:
            self.data.attempt.state.close()
        seconds = time.monotonic() - self.data.launched
        return conclusion.fault_of_ours(fault, self.data.plan, seconds=seconds, folder=self._settle_folder(True))

    def _finish(self, outcome: RunOutcome) -> None:
        data = self.data
        try:
            is_silent = data.scope.is_brief and data.seconds < QUIET
            end = "" if is_silent else f"{data.name}: {end_line(outcome, is_raised=self._hosting.is_raised)}"
            data.output.end(end)
        finally:
            # Waiting threads must be released, whatever happens.
            self._forgotten.detach()
            self._call.close()
            data.outcome = outcome
            data.commands.refuse_all()
            data.gpus.close()
            self._recorder.finish()
            del self._call, self._hosting, self._recorder, self.profiles
            data.over.set()

    # ----------------------------------------------------------------------------------------------------------------
    # The attempts at the call: wait for events of the process tree and for commands, and write the run data.

    def _repeat(self) -> Steps[None]:
        """Repeat the call until an attempt succeeds, is stopped, or no restart is left."""
        data, limit = self.data, self.data.plan.config.max_restarts
        may_start_silently = True
        while True:
            attempt = yield from self._run_attempt()
            has_begun = bool(attempt.state.started) or attempt.ladder is not None
            if attempt.state.tree_lost and not has_begun and may_start_silently:
                # The fork server, or an idle session's supervisor, died unnoticed before this run.
                may_start_silently = False
                attempt.state.close()
                if self.ranks.many_calls:
                    data.output.notice("the session's ranks had died and were restarted")
                self.ranks.start(self._call.call)
                continue
            if not attempt.state.failed or data.restarts >= limit or data.commands.asked_to_stop or attempt.timed_out:
                return
            data.restarts += 1
            data.output.notice(
                f"{data.name}: attempt {data.restarts} {conclusion.describe_failure(data)}; "
                f"starting again ({data.restarts} of {limit} restarts)"
            )
            attempt.state.close()
            conclusion.restart(data, self.ranks, self._call.call)

    def _run_attempt(self) -> Steps[Attempt]:
        data, attempt = self.data, self._new_attempt()
        handle = partial(self._handle, attempt=attempt)
        if self.ranks.many_calls:
            conclusion.replace_the_dead(data, self.ranks, attempt, handle)
        attempt.begin()
        while not attempt.settled:
            self._obey_all(attempt)
            longest = yield
            self._handle_all(attempt.tree.events(self._patience(attempt, longest)), attempt)
            if self._has_live:
                self._has_live = False
                attempt.note_activity()
                self._show_progress()
            self._obey_all(attempt)
            if (failure := attempt.failure_to_debug()) is not None:
                self._debug(failure, attempt)
            attempt.act(lambda: self.read_stacks(attempt))
            self._watch(attempt)
            data.output.publish()
            self.ranks.comms.tick(time.monotonic(), attempt.tree)
            data.usage.tick(time.monotonic(), attempt.tree, data.gpus)
            self._recorder.tick(time.monotonic())
        self._hangs.reset()
        data.hang = None
        if attempt.state.failed:
            yield  # To mend a session takes up to a second.
        for rank in range(data.plan.num_processes):
            for event in attempt.tree.drain(rank):
                handle(event)
        self.ranks.comms.updates.publish(None)
        if attempt.state.tree_lost:
            conclusion.close_ranks(data, self.ranks, attempt)
        elif self.ranks.many_calls:
            conclusion.mend(data, self.ranks, attempt, handle)
        else:
            conclusion.end_ranks(data, self.ranks, attempt, handle)
        return attempt

    def _new_attempt(self) -> Attempt:
        data, tree, config = self.data, self.ranks.tree, self.data.plan.config
        assert tree is not None
        run_call = self.ranks.next_call(
            data.scope,
            restart_count=data.restarts,
            can_ask=self._hosting.can_ask,
            widget_ranks=data.output.choose_widget_ranks(data.scope.widget_ranks),
            checkpoints=tuple(data.checkpoints),
        )
        data.attempt = attempt = Attempt(
            tree,
            run_call,
            self._call.fds,
            deadline=None if config.timeout is None else data.launched + config.timeout,
            idle_timeout=config.idle_timeout,
            debug=config.debug,
        )
        data.stacks = None
        data.asking.clear()
        self.profiles.give_up()
        data.live.settings.forget()  # Ranks that were started again have their first ones.
        # A single rank has no other rank to wait for.
        notice_after = data.scope.notice_after(config.hang_notice) if data.plan.num_processes > 1 else None
        self._hangs = HangWatch(notice_after, time.monotonic(), uses_gpu=data.plan.use_gpu)
        return attempt

    def _patience(self, attempt: Attempt, longest: float | None) -> float | None:
        """Return the seconds until something is due even if nothing happens, at most `longest`; None: nothing is."""
        now, deadline = time.monotonic(), attempt.next_deadline()
        parts = (self._hangs, self.data.output, self.ranks.comms.updates, self.data.usage, self._recorder)
        waits = [longest, None if deadline is None else max(0.0, deadline - now)]
        waits += [part.next_due(now) for part in parts]
        return min((wait for wait in waits if wait is not None), default=None)

    def _show_progress(self) -> None:
        output, now = self.data.output, time.monotonic()
        if not output.shows_progress:
            output.progress("")
        elif now >= self._progress_due:
            self._progress_due = now + PROGRESS_EVERY
            output.progress(progress_line(self.data.name, take_rank_snapshots(self.data)))

    def _watch(self, attempt: Attempt) -> None:
        """Look for ranks that wait in a collective which others have not entered, if a look is due."""
        tree, line = attempt.tree, ""
        if attempt.is_ending or self.data.asking or attempt.requests.paused_after is not None:
            self._hangs.reset()  # The ranks are about to end, or have a reason to wait.
        else:
            line = self._hangs.poll(
                time.monotonic(),
                lambda: tree.pulses(attempt.state.running),
                attempt.state.absent,
                tree.stacks.dump,
            )
        self.data.hang = self._hangs.hang
        if line:
            self.data.output.notice(line)

    # ----------------------------------------------------------------------------------------------------------------
    # Events of the process tree.

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
                self.data.live.fold_all(event)
                self._has_live = True
                self._recorder.note()
                return
            case FromRank(rank, record, _) if isinstance(record, LiveRecord):
                self.data.live.fold(rank, record)
                self._has_live = True
                self._recorder.note()
                return
            case Output():
                self.data.output.console.feed(event.rank, event.stream, event.data)
                self._recorder.note()
            case FromRank(rank, messages.DebugEnded(), _) | RankLost(messages.RankExited(rank=rank)):
                attempt.end_debugging(rank)
            case FromRank(_, messages.CallStarted() | messages.Returned() | messages.Raised(), _):
                pass  # `Attempt.fold` takes them.
            case FromRank(rank, record, _):
                self._show_or_note(rank, record, attempt)
        attempt.fold(event)

    def _show_or_note(self, rank: int, record: object, attempt: Attempt) -> None:  # noqa: C901 - one branch a message
        """Show, pass on or note a record of a rank that is not about the call itself.

        Raises:
            TypeError: The record is unknown, which is a fault of this package.
        """
        data = self.data
        match record:
            case messages.Display() | messages.ClearOutput():
                self.ranks.comms.updates.publish(None)
                data.output.show(rank, record)
            case messages.CommMessage() | messages.CommHandled():
                self.ranks.comms.take(rank, record, data.output.sink)
            case messages.InputRequest():
                self._ask(rank, record, attempt)
            case messages.Notice(text=text, once=once):
                if data.is_new(once):
                    data.output.notice(text)
                    data.note_notice(text)
            case messages.CheckpointSaved(folder=folder):
                data.note_checkpoint(folder)
            case messages.Offered(name=name, value=value):
                data.live.settings.tunables.setdefault(name, value)
            case messages.TrainerMade():
                data.live.settings.note_trainer(record)
            case messages.Changed():
                self._note_change(record, attempt)
            case messages.Profiled():
                self.profiles.note(record)
            case messages.Unreadable(reason=reason):
                data.output.notice(f"rank {rank} sent a record that the kernel could not unpickle ({reason})", "stderr")
            case _:
                raise TypeError(f"the kernel got an unknown message from rank {rank}: {record!r}")

    def _note_change(self, record: messages.Changed, attempt: Attempt) -> None:
        self.data.live.note_change(record)
        attempt.note_change(record)
        if line := describe_change(record):
            self.data.output.notice(line)
        self._recorder.note()

    def _debug(self, failure: RankOutcome, attempt: Attempt) -> None:
        """Let the user look into the frames of the rank that failed first, before the others are stopped."""
        rank, output = failure.rank, self.data.output
        if failure.raised is None or failure.exited is not None:
            output.notice(f"debug=True: the process of rank {rank} has ended; no frames are left to debug")
            return
        error = error_line(failure.raised.report)
        output.notice(f"rank {rank} failed: {error}. The other ranks stay as they are; q ends the run.")
        output.console.show_rank(rank)
        attempt.begin_debugging(rank)

    def _ask(self, rank: int, request: messages.InputRequest, attempt: Attempt) -> None:
        if rank == attempt.state.debugged and attempt.ladder is not None:
            # The run is being stopped, so the debugger ends.
            reply = messages.InputReply(text=None, reason="the run was stopped", number=request.number)
            attempt.tree.send(rank, reply)
            return
        self.data.asking.add(rank)
        attempt.hold_clock()
        self.data.output.publish(force=True)
        self._hosting.questions.put(Question(rank, request, attempt.call_id))

    # ----------------------------------------------------------------------------------------------------------------
    # Commands of other threads.

    def _obey_all(self, attempt: Attempt) -> None:
        for command in self.data.commands.take_all():
            match command:
                case StopCommand():
                    self._stop(command, attempt)
                case Inquiry():
                    command.answer.set(command.work(self, attempt))
                case Answer() if command.call_id == attempt.call_id:  # Else the rank that asked was started again.
                    attempt.tree.send(command.rank, command.reply)
                    self.data.asking.discard(command.rank)
                    if not self.data.asking:
                        attempt.release_clock()

    def _stop(self, command: StopCommand, attempt: Attempt) -> None:
        is_first, kill_asked_at = attempt.ladder is None, self.data.commands.kill_asked_at
        if command.after_step and is_first and attempt.requests.ask_to_stop(attempt.state.unsettled):
            return
        if is_first and attempt.state.debugged is None and math.isinf(kill_asked_at):
            self._show_waits(attempt)
        attempt.stop(at_once=command.at_once, asked_at=kill_asked_at if command.at_once else None)

    def _show_waits(self, attempt: Attempt) -> None:
        """Show a notice about the ranks that wait in a collective, before a stop ends the wait."""
        data, stacks = self.data, self.read_stacks(attempt)
        if not any(stack.waiting_in for stack in stacks):
            return
        data.stopped_in = stacks.past_verdict
        data.output.headline(stacks.in_past_tense)
        if hint := suggestion(stacks, is_checked=data.plan.config.check_collectives, backend=data.plan.backend):
            data.output.notice(hint)

    def read_stacks(self, attempt: Attempt) -> Stacks:
        """Have all ranks write their stacks; wait for the stacks and return them."""
        self.data.stacks = stacks = Stacks.parse(attempt.tree.stacks.dump(), uses_gpu=self.data.plan.use_gpu)
        self._hangs.forgive()
        return stacks

    def take_sample(self, attempt: Attempt) -> dict[int, int]:
        """Have all ranks write their stacks, without waiting; return the positions in their files before that."""
        positions = attempt.tree.stacks.sizes()
        attempt.tree.stacks.request()
        self._hangs.forgive()
        return positions


def _begin_folder(data: RunData, hosting: Hosting, folder: Path) -> Origin:
    """Begin a run's new folder: its edits go there, and the files of its origin."""
    data.edits.keep_in(folder)
    origin = hosting.make_origin()
    start = data.plan.random
    if not isinstance(start, int) and data.kind == "run":  # Ranks of a session continue.
        origin.files[RANDOM] = json.dumps(encode_states(start))
    return origin


class RunThread(threading.Thread):
    """The thread of a run; it refers to the run only while the run goes on."""

    def __init__(self, conduct: RunConduct) -> None:
        super().__init__(name=f"notebook-launcher {conduct.data.name}", daemon=True)
        self.conduct: RunConduct | None = conduct

    def run(self) -> None:
        """Carry out the run."""
        assert self.conduct is not None
        try:
            self.conduct.carry_out()
        finally:
            self.conduct = None
