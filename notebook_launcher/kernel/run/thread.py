"""The thread of one run, which alone writes the run data."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
import weakref
from typing import TYPE_CHECKING

from notebook_launcher.errors import ResourceError
from notebook_launcher.history.recorder import Recorder
from notebook_launcher.kernel.failures.failure_display import end_line
from notebook_launcher.kernel.held_interrupts import can_hold_interrupts, held_interrupts
from notebook_launcher.kernel.run.conclusion import conclude, fault_of_ours
from notebook_launcher.kernel.run.data import RunData
from notebook_launcher.kernel.run.live_reader import LiveRunReader
from notebook_launcher.kernel.run.loop import RunLoop, Steps
from notebook_launcher.kernel.run.progress_line import QUIET
from notebook_launcher.wording.counts import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from notebook_launcher.kernel.calls.call_scope import CallScope
    from notebook_launcher.kernel.calls.origin import Origin
    from notebook_launcher.kernel.calls.outgoing_call import OutgoingCall
    from notebook_launcher.kernel.display.questions import Question
    from notebook_launcher.kernel.hosting import Hosting
    from notebook_launcher.kernel.latch import Latch
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.commands import Command
    from notebook_launcher.kernel.run.outcome import RunOutcome

__all__ = ["RunThread", "live_threads"]

MOMENTS = 0.02
"""Seconds for which a thread that waits for a run carries it out by itself; meanwhile, interrupts are held back."""


class RunThread:
    """Carries a run out in a thread of its own, and concludes it.

    Args:
        ranks: The ranks that serve the run; closed at its end unless they stay for further calls.
        call: The call, which is closed at the end of the run.
        scope: The ranks that the call is for, its description, and how its run is shown.
        hosting: Destination of the run's output, values and questions.
        over: Latch of the run data, which is set when the run is over.
    """

    def __init__(
        self,
        ranks: Ranks,
        call: OutgoingCall,
        scope: CallScope,
        hosting: Hosting,
        over: Latch[None],
    ) -> None:
        self.data = data = RunData.of_call(ranks.plan, scope, hosting, over, in_session=ranks.many_calls)
        """All that is known of the run."""
        self._ranks = ranks
        self._call = call
        self._hosting = hosting
        """Deleted when the run is over, because it knows the function."""
        if ranks.announce_once():
            data.output.headline(f"{data.name}: {data.plan.summary}")
        self._recorder = Recorder(
            LiveRunReader(data),
            None if scope.is_widget_call else data.plan.config.runs_folder,
            data.launched,
            data.output.warn,
            origin=_begin_folder(data, hosting),
        )
        """Writes the run's folder; deleted when the run is over."""
        _announce(data, call)
        self._claim = threading.Lock()
        """Held by the first thread that was started: `begin` may start another one after an interrupt."""
        self._thread: threading.Thread | None = None
        """The thread, once it runs."""
        self._forgotten = weakref.finalize(self, _close_unless_shared, ranks)
        """Closes the ranks when this object is forgotten, in case an interrupt prevents the run from beginning."""
        self._forgotten.atexit = False

    def make_folder(self) -> Path:
        """Make the run's folder now, and not only after a second; return it.

        The folder of a session's call stays empty until the call is found worth recording.

        Raises:
            OSError: The folder cannot be made.
        """
        return self._recorder.reserve_folder() if self._ranks.many_calls else self._recorder.make_folder()

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
            self._finish(self._fail(failure))
            raise failure from error

    def begin_in_cell(self) -> None:
        """Begin the run for a thread that waits for it; may be called again after an interrupt, as `begin`.

        The waiting thread carries out by itself what ends within moments, because it would have to be woken: a call of
        a session takes 1.15 ms then, and 1.6 with a thread. A longer run goes on in its thread, and so does one that
        fails.

        Raises:
            ResourceError: There is no room for a thread. The ranks are gone.
        """
        if not (self._ranks.have_served and can_hold_interrupts()):
            self.begin()
            return
        with held_interrupts():
            if self._thread is not None or not self._claim.acquire(blocking=False):
                return
            steps = self._steps()
            if self._is_over_within(MOMENTS, steps):
                return
            try:
                _Thread(self, steps).start()
            except RuntimeError as error:
                with contextlib.suppress(StopIteration):
                    steps.throw(_no_thread(error))

    def _is_over_within(self, seconds: float, steps: Steps[None]) -> bool:
        """Carry steps out in this thread for so long; return True if they have ended."""
        end = time.monotonic() + seconds
        try:
            next(steps)
            while not self._has_failed and (left := end - time.monotonic()) > 0:
                steps.send(left)
        except StopIteration:
            return True
        return False

    @property
    def _has_failed(self) -> bool:
        return self.data.attempt is not None and self.data.attempt.state.failed

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

    def carry_out(self, steps: Steps[None] | None) -> None:
        """Carry out the run in its thread, or the rest of it: `steps`."""
        if steps is None:
            if not self._claim.acquire(blocking=False):
                return  # `begin` was called again before the first thread reached this line.
            steps = self._steps()
        self._thread = threading.current_thread()
        for _ in steps:
            pass

    def _steps(self) -> Steps[None]:
        """Carry out the run; not before the run begins, because the steps keep this object from being forgotten."""
        try:
            outcome = yield from self._run_loop()
        except BaseException as fault:  # noqa: BLE001 - our own fault must reach the cell, not vanish with the thread
            outcome = self._fail(fault)
        self._finish(outcome)

    def _run_loop(self) -> Steps[RunOutcome]:
        yield from RunLoop(self.data, self._ranks, self._call, self._hosting, self._recorder).run()
        outcome = conclude(self.data, self._settle_folder, self._hosting)
        unsent = outcome.results.unsent
        for reason in dict.fromkeys(unsent.values()):
            ranks = rank_list(rank for rank in unsent if unsent[rank] == reason)
            self.data.output.notice(f"{ranks}: {reason} Everything else of the run is available.", "stderr")
        return outcome

    def _settle_folder(self, *, failed: bool) -> Path | None:
        return self._recorder.settle(failed=failed, is_brief=self.data.scope.is_brief)

    def _fail(self, fault: BaseException) -> RunOutcome:
        with contextlib.suppress(Exception):
            self._ranks.close()
        if self.data.attempt is not None:
            self.data.attempt.state.close()
        seconds = time.monotonic() - self.data.launched
        return fault_of_ours(fault, self.data.plan, seconds=seconds, folder=self._settle_folder(failed=True))

    def _finish(self, outcome: RunOutcome) -> None:
        data = self.data
        try:
            data.output.end("" if data.scope.is_brief and data.seconds < QUIET else self._last_line(outcome))
        finally:
            # Waiting threads must be released, whatever happens.
            self._forgotten.detach()
            self._call.close()
            data.outcome = outcome
            data.commands.refuse_all()
            data.gpus.close()
            self._recorder.finish()
            data.over.set()
            # Closes the files of the logs, and frees the function, now and not when the run is forgotten.
            del self._recorder, self._hosting

    def _last_line(self, outcome: RunOutcome) -> str:
        line = end_line(outcome, asked_to_stop=self.data.commands.asked_to_stop, is_raised=self._hosting.is_raised)
        return f"{self.data.name}: {line}"


class _Thread(threading.Thread):
    """The thread of a run; it refers to the run only while the run goes on."""

    def __init__(self, subject: RunThread, steps: Steps[None] | None = None) -> None:
        super().__init__(name=f"notebook-launcher {subject.data.name}", daemon=True)
        self.subject: RunThread | None = subject
        self._steps = steps
        """The rest of a run that another thread has begun; None: the whole run."""

    def run(self) -> None:
        assert self.subject is not None
        steps, self._steps = self._steps, None
        try:
            self.subject.carry_out(steps)
        finally:
            self.subject = None


def _no_thread(error: RuntimeError) -> ResourceError:
    """Return the error of a run whose thread could not be started."""
    return ResourceError(
        errno.EAGAIN,
        f"the run's thread could not be started: {error}. The limit on processes, which counts threads, may be "
        "reached (`ulimit -u`, or the container's pids limit), or the limit on memory (`ulimit -v`). Use "
        "fewer ranks, or stop other processes.",
    )


def live_threads() -> list[RunThread]:
    """Return the runs in progress in this process, in no order: the interpreter's list of threads has them."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    return [subject for thread in threads if (subject := thread.subject) is not None]


def _begin_folder(data: RunData, hosting: Hosting) -> Callable[[Path], Origin]:
    """Return the function that begins a run's new folder: its edits go there, and the files of its origin."""

    def begin(folder: Path) -> Origin:
        data.edits.keep_in(folder)
        return hosting.make_origin()

    return begin


def _announce(data: RunData, call: OutgoingCall) -> None:
    """Show the notices about what the call takes along: random number generators, and modules that changed."""
    if data.plan.num_processes > 1 and (notice := call.describe_generators()):
        data.output.headline(notice)
    if stale := call.stale_modules():
        forked = data.plan.config.start_method == "fork"
        version = "ranks are forked from it and run it as it was" if forked else "ranks run the file as it is now"
        data.output.notice(f"{', '.join(stale)} changed since the kernel imported it: {version}")


def _close_unless_shared(ranks: Ranks) -> None:
    if not ranks.many_calls:
        ranks.close()
