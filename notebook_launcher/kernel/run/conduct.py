"""The conduct of one run: the run is carried out and concluded, in steps that threads may hand on."""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from typing import TYPE_CHECKING

from notebook_launcher import travel
from notebook_launcher.history.recorder import Recorder
from notebook_launcher.history.run_folders import RANDOM
from notebook_launcher.kernel.failures.failure_display import end_line
from notebook_launcher.kernel.run.conclusion import conclude, fault_of_ours
from notebook_launcher.kernel.run.data import RunData
from notebook_launcher.kernel.run.snapshots import QUIET, LiveRunReader
from notebook_launcher.kernel.run.thread import RunLoop, Steps
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from notebook_launcher.kernel.calls.call_scope import CallScope, OutgoingCall
    from notebook_launcher.kernel.calls.origin import Origin
    from notebook_launcher.kernel.hosting import Hosting
    from notebook_launcher.kernel.latch import Latch
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.conclusion import RunOutcome


class RunConduct:
    """Carries a run out, and concludes it. One thread at a time calls its methods.

    It knows the function and the files of the run, so whoever holds it forgets it when the run is over.

    Args:
        ranks: The ranks that serve the run; closed at its end unless they stay for further calls.
        call: The call, which is closed at the end of the run.
        scope: The ranks that the call is for, its description, and how its run is shown.
        hosting: Destination of the run's output, values and questions.
        over: Latch of the run data, which is set when the run is over.
        began: Time by `time.monotonic()` at which the launch began; None: now.
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
        """All that is known of the run."""
        self.ranks = ranks
        """The ranks that serve the run."""
        self._call = call
        self._hosting = hosting
        self._recorder = Recorder(
            LiveRunReader(data),
            None if scope.is_widget_call else data.plan.config.runs_folder,
            data.launched,
            data.output.warn,
            origin=_begin_folder(data, hosting),
        )
        self._steps: Steps[None] | None = None
        """The rest of the run, once it has begun: until then nothing else may keep this object from being forgotten."""
        self._forgotten = weakref.finalize(self, _close_unless_shared, ranks)
        """Closes the ranks when this object is forgotten, in case an interrupt prevents the run from beginning."""
        self._forgotten.atexit = False

    def announce(self) -> None:
        """Show the run's first lines: ranks and devices, and notices about what the call takes along."""
        data, call = self.data, self._call
        first = f"{data.name}: {data.plan.summary}" if self.ranks.announce_once() else ""
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

    def carry_out(self) -> None:
        """Carry out the run, or the rest of it."""
        for _ in self._begun():
            pass

    def is_over_within(self, seconds: float) -> bool:
        """Carry out the run for so long, or until it fails; return True if it is over."""
        steps, end = self._begun(), time.monotonic() + seconds
        try:
            while not self._has_failed and (left := end - time.monotonic()) > 0:
                steps.send(left)
        except StopIteration:
            return True
        return False

    def give_up(self, error: Exception) -> None:
        """End the run with an error, whether it has begun or not."""
        with contextlib.suppress(StopIteration):
            self._begun().throw(error)

    def _begun(self) -> Steps[None]:
        """Return the steps of the run, begun far enough to take a value or an error."""
        if self._steps is None:
            self._steps = self._carry_out_in_steps()
            next(self._steps)
        return self._steps

    @property
    def _has_failed(self) -> bool:
        return self.data.attempt is not None and self.data.attempt.state.failed

    def _carry_out_in_steps(self) -> Steps[None]:
        try:
            yield  # A generator takes no value before it has stopped once.
            outcome = yield from self._run_loop()
        except BaseException as fault:  # our own fault must reach the cell, not vanish with the thread
            outcome = self._fail(fault)
        self._finish(outcome)

    def _run_loop(self) -> Steps[RunOutcome]:
        yield from RunLoop(self.data, self.ranks, self._call, self._hosting, self._recorder).run()
        outcome = conclude(self.data, self._settle_folder, self._hosting)
        unsent = outcome.results.unsent
        for reason in dict.fromkeys(unsent.values()):
            ranks = rank_list(rank for rank in unsent if unsent[rank] == reason)
            self.data.output.notice(f"{ranks}: {reason} Everything else of the run is available.", "stderr")
        return outcome

    def _settle_folder(self, failed: bool) -> Path | None:
        return self._recorder.settle(failed=failed, is_brief=self.data.scope.is_brief)

    def _fail(self, fault: BaseException) -> RunOutcome:
        with contextlib.suppress(Exception):
            self.ranks.close()
        if self.data.attempt is not None:
            self.data.attempt.state.close()
        seconds = time.monotonic() - self.data.launched
        return fault_of_ours(fault, self.data.plan, seconds=seconds, folder=self._settle_folder(True))

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

    def _last_line(self, outcome: RunOutcome) -> str:
        return f"{self.data.name}: {end_line(outcome, is_raised=self._hosting.is_raised)}"


def _begin_folder(data: RunData, hosting: Hosting) -> Callable[[Path], Origin]:
    """Return the function that begins a run's new folder: its edits go there, and the files of its origin."""

    def begin(folder: Path) -> Origin:
        data.edits.keep_in(folder)
        origin = hosting.make_origin()
        start = data.plan.random
        if not isinstance(start, int) and data.kind == "run":  # Ranks of a session continue.
            origin.files[RANDOM] = json.dumps(travel.encode_states(start))
        return origin

    return begin


def _close_unless_shared(ranks: Ranks) -> None:
    if not ranks.many_calls:
        ranks.close()
