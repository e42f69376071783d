"""The handle on a detached run in a kernel or script that is attached to it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from notebook_launcher.archive.recorded import FolderReader, RecordedRun
from notebook_launcher.detached.attached_output import AttachedOutput, AttachedQuestions, follow
from notebook_launcher.detached.ending import read_ending
from notebook_launcher.detached.host_socket import HostConnection, HostSilentError, continue_host
from notebook_launcher.errors import CallOrderError, RankFailedError, RunFolderError
from notebook_launcher.kernel import views
from notebook_launcher.kernel.failures import failure_display
from notebook_launcher.kernel.latch import AWAKE_EVERY, Latch
from notebook_launcher.kernel.results import Results
from notebook_launcher.kernel.run.conclusion import RunOutcome
from notebook_launcher.kernel.run.handle import Run, still_running

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from typing_extensions import Self

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.detached.ending import Ending
    from notebook_launcher.drawing.run_report import RunReport
    from notebook_launcher.history.schema import RunChange


DYING = 5.0
"""Longest wait in seconds for the end of a host whose sockets the system has closed."""
STOP_WITHIN = 3.0
"""Seconds after the first interrupt in which a second one stops the run."""
P = ParamSpec("P")
T = TypeVar("T")


def by_host(
    method: Callable[Concatenate[Any, P], T], *, needs_ranks: bool = False
) -> Callable[Concatenate[AttachedRun, P], T]:
    """Return the method by which the host carries out this one of `Run`.

    After the run's end its folder answers; if the method `needs_ranks`, that is an error.
    """

    @functools.wraps(method)
    def ask(self: AttachedRun, /, *args: P.args, **kwargs: P.kwargs) -> T:
        answer: T = (self._command if needs_ranks else self._ask)(method.__name__, *args, **kwargs)
        return answer

    return ask


class AttachedRun(FolderReader):
    """A run that its host conducts; `attach(...)` and `launch(..., detached=True)` return it.

    It has the attributes and methods of a `Run`. Each asks the host; after the end of the run they read its folder.

    Args:
        folder: The run's folder, in which the host listens.
    """

    snapshot = by_host(Run.snapshot)
    metrics_since = by_host(Run.metrics_since)
    pictures_since = by_host(Run.pictures_since)
    logs = by_host(Run.logs)
    logs_since = by_host(Run.logs_since)
    log_order = by_host(Run.log_order)
    edit = by_host(Run.edit)
    stacks = by_host(Run.stacks, needs_ranks=True)
    sample = by_host(Run.sample, needs_ranks=True)
    profile = by_host(Run.profile, needs_ranks=True)
    save = by_host(Run.save, needs_ranks=True)
    set = by_host(Run.set, needs_ranks=True)
    set_from_page = by_host(Run.set_from_page, needs_ranks=True)
    pause = by_host(Run.pause, needs_ranks=True)
    resume = by_host(Run.resume, needs_ranks=True)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._recorded = RecordedRun(folder)
        self._over: Latch[None] = Latch()
        """Set once the run is over, after the fields below, or after this process has lost the host."""
        self._ending: Ending | None = None
        self._fault: Exception | None = None
        self._outcome: RunOutcome | None = None
        self._opening = threading.Lock()
        self._follower: threading.Thread | None = None
        self._questions = AttachedQuestions(self._request)
        self._late: views.LateView | None = None
        """The run as a later cell shows it that waits; None if no cell shows the run, or one that waits."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run: as edited, else as launched."""
        return self._recorded.tags

    @property
    def config(self) -> LaunchConfig:
        """The options as given."""
        answer: LaunchConfig = self._ask("config")
        return answer

    def report(self) -> RunReport:
        """Return what is known of the run in plain values, as `Run.report`."""
        from notebook_launcher.drawing.run_report import report_on

        return report_on(self)

    @property
    def changes(self) -> tuple[RunChange, ...]:
        """Settings that `set` has changed so far: name, values before and after, and the update."""
        return self.snapshot().changes

    def check_protocol(self) -> None:
        """Raise `CallOrderError` if the host speaks another protocol, and `TimeoutError` if it does not answer."""
        try:
            HostConnection(self._folder).close()
        except HostSilentError:
            raise
        except OSError:  # There is none any more.
            pass

    def _ask(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Ask the host, or the folder where there is no host any more."""
        try:
            return self._request(name, *args, **kwargs)
        except (OSError, EOFError):
            value = getattr(self._recorded, name)
            return value(*args, **kwargs) if callable(value) else value

    def _command(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._request(name, *args, **kwargs)
        except HostSilentError:
            raise
        except OSError:
            raise CallOrderError(
                f"the run is over ({self._recorded.state}): its ranks are gone. run.result() and run.logs(rank) have "
                "what it left."
            ) from None

    def _request(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        # A connection for each call, so that an interrupt in the middle of an answer spoils nothing: 1 ms.
        with contextlib.closing(HostConnection(self._folder)) as connection:
            return connection.request(name, *args, **kwargs)

    def stop(self, *, wait: bool = True, at_once: bool = False, after_step: bool = False) -> str | None:
        """Stop the run, as `Run.stop`; a host that is stopped (SIGSTOP) is continued for it.

        Raises:
            TimeoutError: The run's host does not answer, though it is not stopped.
        """
        continue_host(self._folder)
        self.check_protocol()
        is_over = self.snapshot().is_over
        if not is_over:
            if not after_step:  # A step may need an answer before it ends.
                self._questions.give_up()
            with contextlib.suppress(CallOrderError):
                self._command("stop", wait=False, at_once=at_once, after_step=after_step)
        if not (wait or is_over):
            return None
        self.wait()
        return None if self._ending is None else self._ending.results.stopped_by

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(run)` in a thread once the run is over; immediately if the run is over already."""
        self._follow()
        self._over.call_when_set(lambda: callback(self))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over, at most `timeout` seconds; return True if the run is over.

        In the main thread of a kernel or terminal, what ranks ask meanwhile (`input()`, `breakpoint()`) is asked here.
        """
        self._follow()
        try:
            if self._late is None:
                return self._wait(timeout)
            return self._late.show_during(lambda: self._wait(timeout))
        except KeyboardInterrupt as error:
            failure_display.show_as(error, f"KeyboardInterrupt: the wait was interrupted; {self.id} is still running")
            raise

    def result(self, timeout: float | None = None) -> Results:
        """Wait for the results and return them.

        Raises:
            TimeoutError: The run is still running after `timeout` seconds.
            RankFailedError: The run's host died.
            RunFolderError: The end in the run's folder is damaged, of another version, or not the user's own.
            BaseException: The exception with which the run failed, as `notebook_launch` raises it.
        """
        error = self.exception(timeout)
        if error is not None:
            failure_display.raise_in_cell(error)
        return self._opened().results

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the run and return the exception with which it failed; None after a success.

        Raises:
            TimeoutError: The run is still running after `timeout` seconds.
        """
        if not self.wait(timeout):
            raise still_running(self, timeout)
        return self._opened().error

    def __await__(self) -> Generator[Any, None, Results]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Results:
        # Unlike with a `Run`, cancelling the wait does not stop the run.
        while not self._over.is_set:
            self._follow()
            await asyncio.sleep(AWAKE_EVERY)
        return self.result()

    def follow_in_cell(self, since: float | None = None) -> None:
        """Show the run in the cell that calls this: its output since the beginning, or of the last `since` seconds."""
        output = self._make_output(since)
        self._follow(output)
        self._late = views.watch(self, output)

    def wait_in_cell(self) -> Results:
        """Wait in the main thread and show the run. The first interrupt releases the cell, a second stops the run."""
        output = self._make_output(None)
        output.is_raised = True
        view = views.RunView(self, output, is_raised=True)
        try:
            self._follow(output)
            while not self._wait(view.step()):
                pass
            view.close()
        except KeyboardInterrupt as error:
            self._release_cell(output, view, error)
            raise
        except BaseException:
            view.close()
            raise
        return self.result()

    def _make_output(self, since: float | None) -> AttachedOutput:
        return AttachedOutput(self._folder, self.config, since)

    def _wait(self, timeout: float | None) -> bool:
        """Wait for the end at most `timeout` seconds, and ask the user what ranks ask; return True if it is there."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._questions.served() as can_answer:
            if not can_answer:
                return self._over.wait(timeout)
            while not self._over.is_set and (left := deadline - time.monotonic()) > 0:
                self._questions.serve(min(left, AWAKE_EVERY))
        return self._over.is_set

    def _release_cell(self, output: AttachedOutput, view: views.RunView, error: KeyboardInterrupt) -> None:
        """Let the cell end after an interrupt, while the run continues; a second interrupt until then stops the run."""
        come_back = f'attach("{self.id}") reconnects to it'
        try:
            output.say(f"the run continues, and {come_back}; interrupt again within {STOP_WITHIN:g} s to stop it")
            is_over = self._over.wait(STOP_WITHIN)
            output.detach()
            view.close()
            what = f"{self.id} {'is over' if is_over else 'is still running'}; {come_back}"
        except KeyboardInterrupt:
            self.stop()
            output.detach()
            view.close()
            what = f"{self.name} was stopped"
        failure_display.show_as(error, f"KeyboardInterrupt: {what}")

    def _follow(self, output: AttachedOutput | None = None) -> None:
        """Have a thread wait for the end of the run; with `output`, show what comes."""
        if self._over.is_set or (self._follower is not None and output is None):
            return
        name = f"notebook-launcher {self.id}"
        self._follower = threading.Thread(target=self._follow_to_end, args=(output,), name=name, daemon=True)
        self._follower.start()

    def _follow_to_end(self, output: AttachedOutput | None) -> None:
        try:
            if output is not None:
                output.follow(self._questions)
            else:
                collections.deque(follow(self._folder, self._questions), maxlen=0)
            try:
                self._ending = read_ending(self._folder)
                if self._ending is None:
                    self._await_loss()
            except RunFolderError as fault:
                self._fault = fault
            if output is not None:
                output.end(self._last_line(is_raised=output.is_raised))
        finally:
            self._over.set()
            self._questions.note(())
            self._questions.wake()

    def _last_line(self, *, is_raised: bool) -> str:
        ending = self._ending
        if ending is None:
            return f"{self.id}: {self._fault or 'its host is gone'}"
        return failure_display.for_raised(ending.last_line, ending.results.failures if is_raised else ())

    def _await_loss(self) -> None:
        """Wait until a host that is gone counts as dead: a process closes its sockets shortly before its end."""
        end = time.monotonic() + DYING
        while not self._recorded.snapshot().is_over and time.monotonic() < end:
            time.sleep(0.01)

    def _opened(self) -> RunOutcome:
        with self._opening:
            if self._ending is None:
                self._outcome = self._outcome or self._lost()
            # The user may have defined a missing class since. What was opened before keeps its identity if not.
            elif self._outcome is None or (left := self._ending.num_unopened(self._outcome)):
                again = self._ending.open(self._folder)
                if self._outcome is None or self._ending.num_unopened(again) < left:
                    self._outcome = again
        return self._outcome

    def _lost(self) -> RunOutcome:
        run = self._recorded.listed()
        if self._folder.exists():
            msg = (
                f"the host process of {self.id} has ended: it was killed, its disk was full, or its machine, login "
                "session or container ended. Its ranks ended with it. What the run wrote until then: run.logs(rank), "
                "run.metrics, and its checkpoints."
            )
        else:
            msg = (
                f"{self._folder} was deleted, and with it all that the run has left; a run in progress is "
                f"stopped then. open_run({self.id!r}).delete() removes the folder only of a run that is over."
            )
        error = self._fault or RankFailedError(msg)
        results = Results({}, num_processes=run.num_processes, seconds=run.seconds, seed=run.seed, folder=self._folder)
        failure_display.attach_failures(error, (), results)
        return RunOutcome(state="failed", results=results, error=error)
