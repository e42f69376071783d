"""A run: one launch of one function, as a handle that outlives the cell.

The run's thread listens to the process tree, draws, and decides (`attempt.py`); the handle's methods
read what it has concluded or put a request in its queue. The main thread, while it waits in a cell,
answers the ranks' questions (`input()`, `breakpoint()`), which no other thread may do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher import messages, travel
from notebook_launcher.engines.local import FromRank, Output
from notebook_launcher.errors import CallOrderError
from notebook_launcher.kernel import cell, checks, probe
from notebook_launcher.kernel.attempt import Attempt
from notebook_launcher.kernel.console import Console, Status, Text
from notebook_launcher.kernel.formatting import format_seconds
from notebook_launcher.kernel.stacks import Stacks
from notebook_launcher.kernel.verdict import Verdict, brief, fault_of_ours, judge

if TYPE_CHECKING:
    from collections.abc import Generator

    from notebook_launcher.engines.local import Event, ProcessTree
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.results import Results

__all__ = ["MetricPoint", "RankSnapshot", "Run"]

State = Literal["starting", "running", "stopping", "done", "failed", "stopped"]

EXIT_BUDGET = 5.0
"""Seconds that ranks get to run their exit handlers after a success."""
FAILED_EXIT_BUDGET = 0.5
LAST_LINES = 10
AWAKE_EVERY = 0.25
TOO_LATE = "the run has just ended: its ranks are gone"
MAX_METRICS = 1_000_000
"""Points of `report(...)` that are kept; beyond, the oldest go."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """What is known of a rank at one moment."""

    rank: int
    pid: int | None
    """None before the process is born and after it has ended."""
    state: Literal["starting", "running", "asking", "returned", "failed", "stopped"]
    done: int | None = None
    """How many items its `track(...)` has done."""
    total: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One call of `report(...)`."""

    rank: int
    step: int
    time: float
    """Seconds since the launch."""
    values: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class _Question:
    rank: int
    request: messages.InputRequest
    call_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
    rank: int
    reply: messages.InputReply
    call_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Stop:
    at_once: bool


class Run:
    """One launch of one function: `launch(...)` returns it at once. `await run` waits and gives the results."""

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        call: Any,
        parcel: int | None,
        *,
        in_cell: bool,
    ) -> None:
        config = ranks.plan.config
        self._ranks = ranks
        self._name = name
        self._call = call
        self._parcel = parcel
        self._in_cell = in_cell
        self._launched = time.monotonic()
        self._console = Console(ranks.plan.num_processes, config.output)  # type: ignore[arg-type]
        self._sink = cell.make_sink()
        self._future: concurrent.futures.Future[Results] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()
        self._for_cell: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[_Answer | _Stop | concurrent.futures.Future[Stacks]] = queue.SimpleQueue()
        self._asking: set[int] = set()
        self._thread_in_input: int | None = None
        self._metrics: list[MetricPoint] = []
        self._num_reported: Counter[int] = Counter()
        self._progress: dict[int, messages.Progress] = {}
        self._attempt: Attempt | None = None
        self._asked_to_stop = False
        self._restarts = 0
        self._stacks: Stacks | None = None
        self._verdict: Verdict | None = None
        self._thread = threading.Thread(target=self._conduct, name=f"notebook-launcher {name}", daemon=True)
        if config.output != "none":
            self._console.notice(f"{name}: {ranks.plan.summary}")
        if stale := travel.stale_modules(parcel):
            forked = config.start_method == "fork"
            version = "ranks are forked from it and run it as it was" if forked else "ranks run the file as it is now"
            self._console.notice(f"{', '.join(stale)} changed since the kernel imported it: {version}")
        self._thread.start()

    @classmethod
    def start(cls, ranks: Ranks, fn: Any, args: Any, kwargs: Any, *, in_cell: bool) -> Run:
        """Check the call, pack it, start the ranks that are not up, and begin; raises before anything starts."""
        args, kwargs = checks.check_call(fn, args, kwargs)
        parcel = None
        if ranks.inherits_call:
            ranks.plan = probe.adapt(ranks.plan)
        else:
            parcel = travel.pack_call(fn, args, kwargs)
        call = (fn, args, kwargs)
        try:
            ranks.start(call)
        except BaseException:
            if parcel is not None:
                os.close(parcel)
            raise
        # From here on the parcel and the ranks are the run's.
        return cls(ranks, checks.name_of(fn), call, parcel, in_cell=in_cell)

    # What the user sees.

    def __repr__(self) -> str:
        seconds = self._verdict.results.seconds if self._verdict else time.monotonic() - self._launched
        num = self._ranks.plan.num_processes
        return f"<Run of {self._name} on {num} rank{'s' * (num > 1)}: {self.state}, {format_seconds(seconds)}>"

    @property
    def state(self) -> State:
        """`"starting"`, `"running"`, `"stopping"`, then `"done"`, `"failed"` or `"stopped"`."""
        if self._verdict is not None:
            return self._verdict.state
        attempt = self._attempt
        if self._asked_to_stop:
            return "stopping"
        return "running" if attempt is not None and attempt.started else "starting"

    @property
    def seed(self) -> int:
        """The base seed: pass it as `seed=` to repeat the run."""
        return self._ranks.plan.seed

    @property
    def ranks(self) -> tuple[RankSnapshot, ...]:
        """What each rank is doing."""
        return tuple(self._snapshot(rank) for rank in range(self._ranks.plan.num_processes))

    def _snapshot(self, rank: int) -> RankSnapshot:
        attempt, tree, progress = self._attempt, self._ranks.tree, self._progress.get(rank)
        state: Any = "starting"
        if attempt is not None and rank in attempt.ends:
            end = attempt.ends[rank]
            state = "returned" if end.returned is not None else "stopped" if end.after_stop else "failed"
        elif attempt is not None and rank in attempt.started:
            state = "asking" if rank in self._asking else "running"
        return RankSnapshot(
            rank=rank,
            pid=tree.pids.get(rank) if tree is not None else None,
            state=state,
            done=progress.done if progress else None,
            total=progress.total if progress else None,
        )

    @property
    def metrics(self) -> tuple[MetricPoint, ...]:
        """Everything that the ranks have reported so far, in the order of arrival."""
        return tuple(self._metrics)

    def logs(self, rank: int) -> str:
        """Return all that a rank has written to its standard output and error so far."""
        return self._console.logs[self._check_rank(rank)].text()

    def _check_rank(self, rank: int) -> int:
        num = self._ranks.plan.num_processes
        if rank not in range(num):
            msg = f"there is no rank {rank!r}: this run has {num}, 0 to {num - 1}"
            raise LookupError(msg)
        return rank

    def stacks(self) -> Stacks:
        """Return where each rank is: function, file, line, and which rank is missing from a collective.

        Raises:
            CallOrderError: The run is over, so no rank is anywhere.
        """
        if self._verdict is not None:
            msg = f"the run is over ({self.state}): its ranks are gone, and so are their stacks"
            raise CallOrderError(msg)
        wanted: concurrent.futures.Future[Stacks] = concurrent.futures.Future()
        self._put(wanted)
        either: list[concurrent.futures.Future[Any]] = [wanted, self._future]
        concurrent.futures.wait(either, return_when=concurrent.futures.FIRST_COMPLETED)
        if not wanted.done():
            raise CallOrderError(TOO_LATE)
        return wanted.result()

    # Waiting and stopping.

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over, at most `timeout` seconds; return whether it is."""
        return bool(concurrent.futures.wait([self._future], timeout).done)

    def result(self, timeout: float | None = None) -> Results:
        """Wait for the results.

        Raises:
            TimeoutError: The run is not over after `timeout` seconds; it goes on.
            BaseException: Whatever the run failed with, as `notebook_launch` raises it.
        """
        if not self.wait(timeout):
            msg = f"the run is not over after {timeout:g} s; it goes on"
            raise TimeoutError(msg)
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return what the run failed with; None after a success."""
        if not self.wait(timeout):
            msg = f"the run is not over after {timeout:g} s; it goes on"
            raise TimeoutError(msg)
        return self._future.exception()

    def stop(self, *, wait: bool = True, at_once: bool = False) -> str | None:
        """Stop the run: ask, interrupt, SIGTERM, SIGKILL, together within 3 seconds. Idempotent.

        Args:
            wait: Whether to wait until the run is over.
            at_once: Kill the ranks without asking.

        Returns:
            The rung that it took, "ask", "interrupt", "terminate" or "kill"; None if the run was over
            before, or if `wait` is False.
        """
        if self._verdict is not None:
            return self._verdict.results.stopped_by
        self._asked_to_stop = True
        self._put(_Stop(at_once))
        if not wait:
            return None
        self.wait()
        return self._verdict.results.stopped_by if self._verdict is not None else None

    def __await__(self) -> Generator[Any, None, Results]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Results:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        self._future.add_done_callback(lambda _: loop.call_soon_threadsafe(over.set))
        try:
            while not self._future.done():
                # A kernel's interrupt cancels the cell's task from a signal handler, which does not wake
                # the event loop (ipykernel 7.4): it takes effect when something else does.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(over.wait(), AWAKE_EVERY)
            return self._future.result()
        except asyncio.CancelledError:
            # Whoever cancels the wait (a kernel's interrupt does) wants the run to end with it, as with
            # any task; `asyncio.shield` is for those who do not.
            self.stop(wait=False)
            raise

    def wait_in_cell(self) -> Results:
        """Wait in the main thread, answering the ranks' questions; an interrupt stops the run."""
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                question = self._for_cell.get()
                if question is None:
                    break
                self._answer(question)
            except KeyboardInterrupt as interrupt:
                if self._is_over:
                    continue  # Our own, which took the main thread out of `input()`.
                # The second one means now.
                self.stop(wait=False, at_once=interrupted is not None)
                interrupted = interrupt
        if interrupted is None:
            return self._future.result()
        error = KeyboardInterrupt()
        error.results = self._verdict.results if self._verdict else None  # type: ignore[attr-defined]
        raise error

    def _answer(self, question: _Question) -> None:
        request = question.request
        text, reason = None, ""
        try:
            self._thread_in_input = threading.get_ident()
            if self._is_over:
                return
            text = cell.ask(request.prompt, password=request.password)
        except EOFError as error:
            reason = str(error)
        finally:
            self._thread_in_input = None
        reply = messages.InputReply(text=text, reason=reason, number=request.number)
        self._put(_Answer(question.rank, reply, question.call_id))

    def _put(self, command: Any) -> None:
        self._commands.put(command)
        tree = self._ranks.tree
        if tree is not None:
            tree.wake()

    # The run's thread.

    def _conduct(self) -> None:
        try:
            verdict = self._judge(self._run_attempts())
        except BaseException as fault:  # noqa: BLE001 - a fault of ours must reach the cell, not vanish with the thread
            with contextlib.suppress(Exception):
                self._ranks.close()
            verdict = fault_of_ours(fault, self._ranks.plan, seconds=time.monotonic() - self._launched)
        try:
            self._say_end(verdict.error)
        finally:
            # Whoever waits must be told, whatever happens.
            if self._parcel is not None:
                os.close(self._parcel)
            self._call = self._parcel = None
            self._verdict = verdict
            self._refuse_commands()
            if verdict.error is None:
                self._future.set_result(verdict.results)
            else:
                self._future.set_exception(verdict.error)
            self._leave_input()
            self._for_cell.put(None)

    @property
    def _is_over(self) -> bool:
        return self._future.done()

    def _leave_input(self) -> None:
        """Take the main thread out of an `input()` whose answer nobody needs any more."""
        thread = self._thread_in_input
        if thread is not None and thread == threading.main_thread().ident:
            signal.pthread_kill(thread, signal.SIGINT)

    def _run_attempts(self) -> Attempt:
        limit = self._ranks.plan.config.max_restarts
        may_be_born_again = True
        while True:
            attempt = self._attempt_once()
            was_stopped = attempt.ladder is not None
            if attempt.supervisor_lost is not None and not (attempt.started or was_stopped) and may_be_born_again:
                # The fork server, or an idle session's supervisor, died before anybody noticed.
                may_be_born_again = False
                if self._ranks.many_calls:
                    self._console.notice("the session's ranks were gone; all were started anew")
                self._ranks.start(self._call)
                continue
            failed = any(end.failed for end in attempt.ends.values()) or attempt.supervisor_lost is not None
            if not failed or self._restarts >= limit or self._asked_to_stop or attempt.timed_out:
                return attempt
            self._restarts += 1
            verdict = self._judge(attempt)
            self._console.notice(
                f"{self._name}: attempt {self._restarts} {brief(verdict.error, verdict.results.seconds)}; "
                f"starting again ({self._restarts} of {limit} restarts)"
            )
            self._ranks.start(self._call)

    def _attempt_once(self) -> Attempt:
        tree = self._ranks.tree
        assert tree is not None
        call = self._ranks.next_call(restart_count=self._restarts, can_ask=self._in_cell)
        timeout = self._ranks.plan.config.timeout
        deadline = None if timeout is None else self._launched + timeout
        attempt = self._attempt = Attempt(tree, call, self._parcel, deadline=deadline)
        self._asking.clear()
        self._stacks = None
        self._replace_the_dead(tree, attempt)
        attempt.begin()
        while not attempt.settled:
            self._obey(attempt)
            for event in tree.events(self._patience(attempt)):
                self._take(event, attempt)
            self._obey(attempt)
            attempt.act(self._look_at_stacks)
            self._publish()
        self._settle(attempt)
        return attempt

    def _replace_the_dead(self, tree: ProcessTree, attempt: Attempt) -> None:
        """Replace ranks of a session that died while nobody was looking."""
        if not self._ranks.many_calls:
            return
        while events := tree.events(0):
            for event in events:
                self._take(event, attempt)
        if attempt.ends and attempt.supervisor_lost is None:
            self._say_replaced(self._ranks.mend(attempt.ends))
            attempt.forget_ends(self._ranks.generation)

    def _patience(self, attempt: Attempt) -> float | None:
        now = time.monotonic()
        deadline = attempt.next_deadline()
        waits = [self._console.next_due(now), None if deadline is None else max(0.0, deadline - now)]
        return min((wait for wait in waits if wait is not None), default=None)

    def _settle(self, attempt: Attempt) -> None:
        """End the processes, or make them ready for the next call."""
        tree = self._ranks.tree
        assert tree is not None
        failed = any(end.failed for end in attempt.ends.values())
        for rank in range(self._ranks.plan.num_processes):
            for event in tree.drain(rank):
                self._take(event, attempt)
        if attempt.supervisor_lost is not None:
            self._ranks.close()
            return
        if self._ranks.many_calls:
            self._say_replaced(self._ranks.mend(attempt.ends))
            return
        budget = FAILED_EXIT_BUDGET if failed else EXIT_BUDGET
        for events in self._ranks.finish(budget):
            for event in events:
                self._take(event, attempt)
            self._publish()
        for rank in tree.pids:
            attempt.ends[rank].after_stop = True
            if not failed:
                self._console.notice(
                    f"rank {rank} was killed: {EXIT_BUDGET:g} s after it returned it was still running exit handlers "
                    "or threads",
                    "stderr",
                )
        self._ranks.close()

    def _say_replaced(self, replaced: tuple[int, ...]) -> None:
        if replaced:
            listed = ", ".join(str(rank) for rank in replaced)
            self._console.notice(
                f"rank{'s' * (len(replaced) > 1)} {listed} had ended and {'was' if len(replaced) == 1 else 'were'} "
                "started anew, with nothing of the earlier runs in memory"
            )

    def _take(self, event: Event, attempt: Attempt) -> None:
        match event:
            case Output(rank, stream, data):
                self._console.feed(rank, stream, data)
            case FromRank(rank, messages.Display() | messages.ClearOutput() as record, _):
                self._show(rank, record)
            case FromRank(rank, messages.InputRequest() as record, _):
                self._ask(rank, record, attempt)
            case FromRank(rank, messages.Metrics() as record, _):
                self._keep(rank, record)
            case FromRank(rank, messages.Progress() as record, _):
                self._progress[rank] = record
            case FromRank(_, messages.Notice() as record, _):
                self._console.notice(record.text)
            case FromRank(rank, messages.Unreadable() as record, _):
                text = f"rank {rank} sent something that cannot be read in the kernel ({record.reason})"
                self._console.notice(text, "stderr")
        attempt.fold(event)

    def hear(self, events: list[Event]) -> None:
        """Show what the ranks write after the run is over, while a session ends."""
        for event in events:
            if isinstance(event, Output):
                self._console.feed(event.rank, event.stream, event.data)
        self._console.finish()
        self._publish(force=True)
        self._sink.close()

    def _show(self, rank: int, record: messages.Display | messages.ClearOutput) -> None:
        shown = self._ranks.plan.config.display
        if shown == "none" or (shown == "rank0" and rank != 0):
            return
        self._publish(force=True)
        with contextlib.suppress(Exception):
            if isinstance(record, messages.ClearOutput):
                self._sink.clear_output(wait=record.wait)
            else:
                self._sink.display(record.data, record.metadata, record.transient, update=record.update)

    def _ask(self, rank: int, request: messages.InputRequest, attempt: Attempt) -> None:
        self._asking.add(rank)
        attempt.pause(paused=True)
        self._publish(force=True)
        self._for_cell.put(_Question(rank, request, attempt.call_id))

    def _keep(self, rank: int, record: messages.Metrics) -> None:
        step = self._num_reported[rank] if record.step is None else record.step
        self._num_reported[rank] += 1
        seconds = record.time - self._launched
        self._metrics.append(MetricPoint(rank=rank, step=step, time=seconds, values=record.values))
        if len(self._metrics) > MAX_METRICS:
            del self._metrics[: MAX_METRICS // 10]

    def _obey(self, attempt: Attempt) -> None:
        while not self._commands.empty():
            match self._commands.get():
                case _Stop(at_once):
                    if attempt.ladder is None and not at_once:
                        self._show_who_waits()
                    attempt.stop(at_once=at_once)
                case _Answer(rank, reply, call_id):
                    if call_id != attempt.call_id:
                        continue  # To a question of a rank that has been started anew since.
                    attempt.tree.send(rank, reply)
                    self._asking.discard(rank)
                    attempt.pause(paused=bool(self._asking))
                case wanted:
                    wanted.set_result(self._look_at_stacks())

    def _look_at_stacks(self) -> Stacks:
        assert self._ranks.tree is not None
        self._stacks = Stacks.parse(self._ranks.tree.dump_stacks())
        return self._stacks

    def _show_who_waits(self) -> None:
        stacks = self._look_at_stacks()
        if any(stack.waiting_in for stack in stacks):
            self._console.notice(str(stacks), "stderr")

    def _refuse_commands(self) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, concurrent.futures.Future):
                command.set_exception(CallOrderError(TOO_LATE))

    def _publish(self, *, force: bool = False) -> None:
        for message in self._console.take(time.monotonic(), force=force):
            # A closed pipe or file must not fail the run; the logs have it all.
            with contextlib.suppress(Exception):
                match message:
                    case Text(stream, text):
                        self._sink.text(stream, text)
                    case Status(text):
                        self._sink.status(text)

    def _judge(self, attempt: Attempt) -> Verdict:
        return judge(
            attempt,
            self._ranks.plan,
            launched=self._launched,
            ended=time.monotonic(),
            restarts=self._restarts,
            asked_to_stop=self._asked_to_stop,
            stacks=self._stacks,
            last_lines=lambda rank: self._console.logs[rank].tail(LAST_LINES),
        )

    def _say_end(self, error: BaseException | None) -> None:
        seconds = format_seconds(time.monotonic() - self._launched)
        if self._ranks.plan.config.output != "none":
            if error is None:
                text = f"done in {seconds}"
            elif self._asked_to_stop:
                text = f"stopped after {seconds}"
            else:
                text = brief(error, time.monotonic() - self._launched)
            self._console.notice(f"{self._name}: {text}")
        self._console.finish()
        self._publish(force=True)
        self._sink.close()
