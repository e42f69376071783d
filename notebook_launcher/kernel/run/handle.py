"""A run: the handle on one launch of one function, which outlives the cell."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from notebook_launcher import travel
from notebook_launcher.archive.recorded import check_edits
from notebook_launcher.errors import CallOrderError, check_rank
from notebook_launcher.kernel import views
from notebook_launcher.kernel.calls import checks, everywhere, origin
from notebook_launcher.kernel.calls.call_scope import EVERYWHERE, CallScope, OutgoingCall
from notebook_launcher.kernel.display import cell, sink
from notebook_launcher.kernel.display.questions import Questions
from notebook_launcher.kernel.failures import failure_display, post_mortem
from notebook_launcher.kernel.hosting import Hosting
from notebook_launcher.kernel.inspection.profiles import check_profile
from notebook_launcher.kernel.inspection.stacks import Samples
from notebook_launcher.kernel.latch import AWAKE_EVERY, Latch
from notebook_launcher.kernel.run.commands import Inquiry, StopCommand, no_update_yet
from notebook_launcher.kernel.run.conduct import RunConduct
from notebook_launcher.kernel.run.ladder import limited_start
from notebook_launcher.kernel.run.snapshots import LiveRunReader
from notebook_launcher.settings.changes import check_change, read_wanted
from notebook_launcher.tracebacks import for_caller
from notebook_launcher.travel.function_call import RankFunction
from notebook_launcher.wording import format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from typing_extensions import Self

    from notebook_launcher.detached.attached_run import AttachedRun
    from notebook_launcher.kernel.inspection.profiles import Profile
    from notebook_launcher.kernel.inspection.stacks import Stacks
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.kernel.run.conclusion import RunOutcome
    from notebook_launcher.kernel.run.data import RunData
    from notebook_launcher.messaging.messages import ChangeAction, ChangeSource
    from notebook_launcher.settings.changes import Wanted

    AnyRun: TypeAlias = "Run | AttachedRun"
    """A handle on a run, wherever its thread is: in this process, or in a host. Code that shows runs takes both."""


MAX_SAMPLING, MAX_RATE = 60.0, 100.0
"""Seconds of sampling, and samples a second: each sample of a rank takes some kilobytes of memory."""
TOO_LATE = "the run has just ended: its ranks are gone. run.result() and run.logs(rank) have what it left."

T = TypeVar("T")


def still_running(run: AnyRun, timeout: float | None) -> TimeoutError:
    """Return the error of a wait that ended before its run."""
    return TimeoutError(
        f"the run is still running after {timeout:g} s ({run.id}): only the wait for it is over. Call result() without "
        "a timeout to wait until its end, stacks() to see what its ranks do, or stop() to end it."
    )


def data_of(run: Run) -> RunData:
    """Return the data of a run, for the session that the run belongs to; they are read once the run is over."""
    return run._data  # noqa: SLF001 - `Run` is public, and its data are not


class Run(LiveRunReader):
    """One launch of one function: `launch(...)` returns it at once, `await run` waits and returns the results."""

    def __init__(self, conduct: RunConduct, questions: Questions | None = None) -> None:
        super().__init__(conduct.data)
        self._conduct = conduct
        self._questions = questions
        """Questions of ranks to the user; None in a host, whose clients answer them."""
        self._late: views.LateView | None = None
        """The run as a later cell shows it that waits; None if its own cell waits."""

    @classmethod
    def start(
        cls,
        ranks: Ranks,
        fn: Any,
        args: Any,
        kwargs: Any,
        *,
        in_cell: bool,
        scope: CallScope = EVERYWHERE,
        began: float | None = None,
    ) -> Run:
        """Check and pack the call, start ranks that are not up, and begin the run; raises before anything starts.

        The run has taken time since `began`; None: since now.
        """
        began = time.monotonic() if began is None else began
        steps = everywhere.setup_steps(ranks.plan.config)
        if isinstance(fn, RankFunction):  # A call of this package needs no check, which takes 0.1 ms of a cell's 4.
            call = travel.FunctionCall(fn, tuple(args), dict(kwargs or {}), steps)
        else:
            verb = "run" if in_cell else "launch"
            single = "notebook_launch(fn, 2" if in_cell else "launch(fn, 2"
            launcher = f"session.{verb}(fn" if ranks.many_calls else single
            call = checks.check_call(fn, args, kwargs, launcher=launcher, steps=steps)
        if ranks.plan.config.debug:
            post_mortem.check_answers("debug=True", in_cell=in_cell)
        config, outgoing = ranks.plan.config, OutgoingCall(call)
        over: Latch[None] = Latch()
        questions = Questions(over)
        try:
            with limited_start(ranks.plan.config.timeout, began):
                if ranks.tree is None and config.start_method == "fork":  # The ranks inherit the call.
                    ranks.plan = checks.adapt(ranks.plan)
                    ranks.start(call)
                else:
                    outgoing.pack(start=lambda: ranks.start(call), tell=sink.teller(config))
            hosting = Hosting(
                sink=sink.make_sink(),
                take_value=travel.unpack_value,
                take_exception=lambda fd, _report: travel.unpack_exception(fd),
                questions=questions,
                can_ask=in_cell,
                is_raised=in_cell,
                make_origin=lambda: origin.Origin(origin.source_with_needs(fn), origin.describe_environment()),
                logs_at="open_run({id!r}).logs(rank)" if in_cell and config.runs_folder else "run.logs(rank)",
            )
            conduct = RunConduct(ranks, outgoing, scope.describe(call, config.name), hosting, over, began)
            is_agents = in_cell and conduct.data.kind == "run" and config.output != "none" and hosting.sink.is_brief
            if is_agents and (news := cell.take_news()) is not None:
                told = f"{news}No person waits for this cell, and an interrupt stops its run. {_hint(conduct.data)}"
                conduct.data.output.headline(told)
            conduct.announce()
        except BaseException:
            outgoing.close()
            if not ranks.many_calls:
                ranks.close()
            raise
        # From here on the run's thread closes the call and the ranks.
        run = cls(conduct, questions)
        if not in_cell:
            conduct.begin()
            run._late = views.watch(run, run._data.output)
        return run

    def __repr__(self) -> str:
        data, num = self._data, self._data.plan.num_processes
        return f"<Run of {data.name} on {plural(num, 'rank')}: {self.state}, {format_seconds(data.seconds)}>"

    @property
    def outcome(self) -> RunOutcome | None:
        """The end of the run, of which nothing is raised here; None until the run is over.

        Its `state` is `"done"`, `"failed"` or `"stopped"`, its `results` are those of the ranks that returned, and its
        `error` is the exception that `result()` raises, or None.
        """
        return self._data.outcome

    def logs(self, rank: int) -> str:
        """Return everything that a rank has written to standard output and standard error so far.

        Raises:
            NoSuchRankError: The run has no such rank.
        """
        return self._data.output.logs[self._check_rank(rank)].text()

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        """Return the text that a rank wrote after a position, and the next position; start with 0."""
        return super().logs_since(self._check_rank(rank), position)

    def _check_rank(self, rank: int) -> int:
        return check_rank(rank, self._data.plan.num_processes)

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(run)` in the run's thread once the run is over; immediately if the run is over already."""
        self._data.over.call_when_set(lambda: callback(self))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over, at most `timeout` seconds; return True if the run is over.

        In a program that runs notebooks, such as papermill, the cell that waits shows what its ranks write.
        """
        try:
            over = self._data.over
            return over.wait(timeout) if self._late is None else self._late.show_during(lambda: over.wait(timeout))
        except KeyboardInterrupt as error:
            failure_display.show_as(error, f"KeyboardInterrupt: the wait was interrupted; {self.name} is still running")
            raise

    def result(self, timeout: float | None = None) -> Results:
        """Wait for the results and return them.

        Raises:
            TimeoutError: The run is still running after `timeout` seconds.
            BaseException: The exception with which the run failed, as `notebook_launch` raises it.
        """
        self._wait_for_end(timeout)
        return self._results_or_raise()

    def _wait_for_end(self, timeout: float | None) -> None:
        if not self.wait(timeout):
            raise still_running(self, timeout)

    def _results_or_raise(self) -> Results:
        outcome = self._data.outcome
        assert outcome is not None
        if outcome.error is not None:
            failure_display.raise_in_cell(outcome.error)
        return outcome.results

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the run and return the exception with which it failed; None after a success.

        Raises:
            TimeoutError: The run is still running after `timeout` seconds.
        """
        self._wait_for_end(timeout)
        outcome = self._data.outcome
        return None if outcome is None else outcome.error

    def stop(self, *, wait: bool = True, at_once: bool = False, after_step: bool = False) -> str | None:
        """Stop the run: ask, interrupt, SIGTERM, SIGKILL, together within 3 seconds. Idempotent.

        Args:
            wait: Wait until the run is over.
            at_once: Kill the ranks without asking.
            after_step: Only ask, and give the ranks as long as their present step takes. Ranks that make updates
                with an `Accelerator` all stop after the same update; other ranks stop at their next `report` or
                item of `track`. If no rank does any of these, the run is stopped as usual. Another `stop()` does
                not wait for the step.

        Returns:
            The last rung that was needed, even if the stopped run is over: "ask", "interrupt",
            "terminate" or "kill". None if the run ended by itself, or still runs because `wait` is False.
        """
        if self._data.outcome is not None:
            return self._data.outcome.results.stopped_by
        self._conduct.command(StopCommand(at_once, after_step))
        self._conduct.begin()  # An interrupt may have prevented `begin`; without it, `over` would never be set.
        if not wait:
            return None
        self.wait()
        return self._data.outcome.results.stopped_by if self._data.outcome is not None else None

    def __await__(self) -> Generator[Any, None, Results]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Results:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        self._data.over.call_when_set(lambda: loop.call_soon_threadsafe(over.set))
        if self._late is not None:
            self._late.show_during(lambda: False)
        try:
            while not self._data.over.is_set:
                # A kernel's interrupt cancels the cell's task from a signal handler, which does not wake the event
                # loop (ipykernel 7.4). The cancellation takes effect when the loop wakes for another reason.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(over.wait(), AWAKE_EVERY)
            return self._results_or_raise()
        except asyncio.CancelledError:
            # Cancelling the wait, as a kernel's interrupt does, ends the run, as it ends any awaited task. To cancel
            # the wait alone, use `asyncio.shield`.
            self.stop(wait=False)
            raise

    def wait_in_cell(self) -> Results:
        """Begin the run, wait in the main thread and answer the ranks' questions; an interrupt stops the run."""
        conduct, data = self._conduct, self._data
        assert self._questions is not None
        hidden = data.scope.is_widget_call
        with contextlib.closing(views.RunView(self, data.output, is_raised=True, is_hidden=hidden)) as view:
            try:
                interrupted = self._questions.answer_all(
                    conduct.begin_in_cell,
                    conduct.command,
                    lambda again: self.stop(wait=False, at_once=again),  # A second interrupt kills the ranks.
                    view.step,
                )
            except KeyboardInterrupt:  # A further interrupt, while an earlier one was being handled.
                self.stop(at_once=True)
                interrupted = True
        conduct.join()
        if not interrupted:
            return self._results_or_raise()
        error = failure_display.interrupted(self.name, data.outcome)
        if data.kind == "run" and data.output.sink.is_brief:
            cell.note_for_agent(f"{self.name} was stopped by an interrupt after {format_seconds(data.seconds)}. ")
            failure_display.add_hint(error, _hint(data))
        raise error

    # ----------------------------------------------------------------------------------------------------------------
    # The user looks into the run and changes it: each method asks the run's thread.

    def edit(self, *, name: str | None = None, tags: Iterable[str] | None = None, notes: str | None = None) -> None:
        """Change the run's name, tags or notes, even after its end; None leaves each as it is.

        Raises:
            ConfigError: The name or a tag is not text.
            OSError: The run's folder cannot be written.
        """
        self._data.edits.change(check_edits(name, tags, notes))

    def stacks(self) -> Stacks:
        """Return the stack of each rank: function, file, line, and which rank is missing from a collective.

        Raises:
            CallOrderError: The run is over, so there are no stacks.
        """
        self._check_goes_on("its ranks are gone, and so are their stacks")
        return self._ask(RunConduct.read_stacks)

    def sample(self, seconds: float = 5.0, *, rate: float = 20.0) -> Samples:
        """Sample the stacks of all ranks for a while, and return where their time went: a drawing in a cell.

        The ranks write their stacks at a signal, as for `stacks()`. Each sample stops a rank for less than a
        millisecond.

        Args:
            seconds: Duration, at most 60.
            rate: Samples per second, at most 100.

        Raises:
            ValueError: The duration or the rate cannot work.
            CallOrderError: The run is over, or ended meanwhile.
        """
        are_numbers = all(isinstance(given, (int, float)) and not isinstance(given, bool) for given in (seconds, rate))
        if not (are_numbers and 0 < seconds <= MAX_SAMPLING and 0 < rate <= MAX_RATE):
            msg = (
                f"sample(seconds={seconds!r}, rate={rate!r}): seconds must be a number, more than 0 and up to "
                f"{MAX_SAMPLING:g}, and rate more than 0 and up to {MAX_RATE:g} per second."
            )
            raise for_caller(ValueError(msg))
        self._check_goes_on("its ranks are gone, and so are their stacks")
        starts, end = self._ask(RunConduct.take_sample), time.monotonic() + seconds
        while time.monotonic() < end and not self._data.over.wait(1 / rate):
            self._ask(RunConduct.take_sample)
        return Samples.parse(self._ask(lambda _, attempt: attempt.tree.stacks.read(starts)))

    def profile(self, updates: int = 3, *, ranks: Sequence[int] = (0,)) -> Profile:
        """Profile some updates with `torch.profiler` during the training; wait for the result.

        The profile begins after an update, the same one on all chosen ranks, and lasts until `updates` further ones are
        made. It ends earlier if the function ends. In a cell the result is a table of the operators that took most
        time, with a link to the trace, which is a compressed Chrome trace in the run's folder. Profiled updates are
        slower.

        Args:
            updates: Number of updates, at most 100: a trace has a line for each operator that ran.
            ranks: The ranks to profile.

        Raises:
            ValueError: The number of updates cannot be, or no rank is chosen.
            NoSuchRankError: The run has no such rank.
            CallOrderError: The run is over, or ended meanwhile; no Accelerator has made an update in the run yet; a
                profile is under way already; or the function itself uses `torch.profiler` at the time.
        """
        chosen = check_profile(updates, ranks, self._data.plan.num_processes)
        self._check_goes_on("there is nothing left to profile")
        begun = self._ask(lambda conduct, attempt: conduct.profiles.begin(updates, chosen, attempt.requests))
        profile = self._answer_of(begun)
        if isinstance(profile, str):
            ways = "and try again after the first update; run.sample(seconds) shows where the time of any function goes"
            trainer = self._data.live.settings.trainer
            raise CallOrderError(profile or no_update_yet("there is nothing to profile", ways, trainer))
        return profile

    def save(self) -> None:
        """Ask for a checkpoint: all ranks write it after the same update, and the training continues.

        The first Accelerator that made an update writes the checkpoint with `save_state`, when its loop asks for the
        next batch: to the next folder if `ProjectConfiguration(automatic_checkpoint_naming=True)`, else to
        `checkpoints/update_<number>` in its project folder, or in the working directory. A line in the cell names
        the folder. Trainers of transformers and Lightning write checkpoints of their own kind.

        Raises:
            CallOrderError: The run is over, or no Accelerator has made an update in the run yet.
        """
        self._check_goes_on("there is nothing left to save")
        if not self._ask(lambda _, attempt: attempt.requests.ask_to_save()):
            trainer = self._data.live.settings.trainer
            raise CallOrderError(no_update_yet("it cannot be saved", "or save in the function itself", trainer, "save"))

    def set(self, /, **settings: float | str | None) -> None:
        """Change settings during the training, on all ranks after the same update.

        `run.set(lr=1e-4)` gives a value, `run.set(lr="x0.5", max_grad_norm=1.0)` a factor and a value. The first
        Accelerator that made an update, or a trainer of transformers or Lightning, carries the change out before its
        next micro-batch. A line in the cell and `run.changes` show it.

        Args:
            settings: New values, or factors such as `"x0.5"`. `lr`: the learning rate of each prepared optimizer's
                first parameter group; other groups keep their ratios to it, and prepared schedulers their shape.
                `max_grad_norm`: a number, or None for no clipping. `gradient_accumulation_steps`: a whole number, from
                the next window on. All others: what the function offers by `tunable(...)`.

        Raises:
            ValueError: A setting is unknown, a value cannot work, or the trainer of another library cannot change it.
                Nothing is changed.
            CallOrderError: The run is over, or no Accelerator has made an update in the run yet.
        """
        if settings:
            self._change("set", {name: self._check_change(name, value) for name, value in settings.items()})

    def set_from_page(self, name: str, text: str) -> None:
        """Change one setting to the text that was typed into the monitor's field for it; errors as for `set`."""
        self._change("set", {name: self._check_change(name, read_wanted(text))}, "monitor")

    def pause(self) -> None:
        """Hold all ranks after the same update, until `run.resume()`; the time limit does not count meanwhile.

        Settings can be changed, and checkpoints written, while the ranks are held. `run.state` is `"paused"` then.

        Raises:
            CallOrderError: As for `set`.
        """
        self._change("pause", {})

    def resume(self) -> None:
        """Continue the training of a paused run.

        Raises:
            CallOrderError: As for `set`.
        """
        self._change("resume", {})

    def _change(self, action: ChangeAction, values: dict[str, Wanted], source: ChangeSource = "code") -> None:
        self._check_goes_on("there is nothing left to change")
        if not self._ask(lambda _, attempt: attempt.requests.ask_to_change(action, values, source)):
            consequence, advice = "nothing can be changed", "and try again after the first update"
            raise CallOrderError(no_update_yet(consequence, advice, self._data.live.settings.trainer, "change"))

    def _check_change(self, name: str, wanted: object) -> Wanted:
        known = self._data.live.settings
        trainer = known.trainer.name if known.trainer is not None and known.trainer.settings else ""
        return check_change(name, wanted, known.tunables, known.of_accelerator, trainer)

    def _check_goes_on(self, consequence: str) -> None:
        if self._data.outcome is not None:
            raise CallOrderError(f"the run is over ({self.state}): {consequence}")

    def _ask(self, work: Callable[[RunConduct, Attempt], T]) -> T:
        """Have the run's thread do some work, and return the result."""
        inquiry = Inquiry(work)
        self._conduct.command(inquiry)
        return self._answer_of(inquiry.answer)

    def _answer_of(self, answer: Latch[T]) -> T:
        while not (answer.wait(AWAKE_EVERY) or self._data.over.is_set):
            pass
        if answer.value is None:
            raise CallOrderError(TOO_LATE)
        return answer.value


def _hint(data: RunData) -> str:
    call = f"launch({data.scope.name}, {data.plan.num_processes}, ..., detached=True)"
    return f"To return at once, and ask later: run = {call}; then run.wait(20); run.report()"
