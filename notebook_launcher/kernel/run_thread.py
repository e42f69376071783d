"""A run's thread: it listens to the process tree, draws, and carries out what `attempt.py` decides."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import queue
import re
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING

from notebook_launcher import messages, travel
from notebook_launcher.engines.events import FromRank, Output
from notebook_launcher.errors import ResourceError
from notebook_launcher.history.recorder import Recorder
from notebook_launcher.kernel.argument_text import describe_arguments
from notebook_launcher.kernel.attempt import Attempt
from notebook_launcher.kernel.failure_display import brief, mishaps
from notebook_launcher.kernel.hangs import HangWatch
from notebook_launcher.kernel.latch import Latch
from notebook_launcher.kernel.live import LiveRecords
from notebook_launcher.kernel.meter import GpuMeter
from notebook_launcher.kernel.outcome import RunOutcome, conclude, fault_of_ours
from notebook_launcher.kernel.output import RunOutput
from notebook_launcher.kernel.progress_line import ProgressLine
from notebook_launcher.kernel.questions import Answer, Question, Questions
from notebook_launcher.kernel.snapshots import LiveRunReader
from notebook_launcher.kernel.stacks import Stacks
from notebook_launcher.units import format_seconds

if TYPE_CHECKING:
    from notebook_launcher.channel import AnonymousFile
    from notebook_launcher.engines.events import Event
    from notebook_launcher.engines.process_tree import ProcessTree
    from notebook_launcher.kernel.ranks import Ranks

__all__ = ["EXIT_BUDGET", "TOO_LATE", "Command", "RunThread", "Save", "Stop"]

EXIT_BUDGET = 5.0
"""Seconds that ranks get to run their exit handlers after a success."""
FAILED_EXIT_BUDGET = 0.5
"""After a failure, and from the moment of a stop."""
DEATH_NOTICE = 1.0
"""Seconds that the supervisor gets to tell how a rank has ended that has hung up."""
TOO_LATE = "the run has just ended: its ranks are gone"


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """The wish to stop the run."""

    at_once: bool = False
    after_step: bool = False
    """Only ask: the ranks stop at their next step boundary, however far that is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """The wish for a checkpoint."""

    answered: Latch[bool]
    """Whether an Accelerator answers to it."""


Command = Answer | Stop | Save | Latch[Stacks]


class RunThread:
    """Carries a run out. Other threads read what it knows, and send it commands."""

    def __init__(
        self, ranks: Ranks, name: str, call: travel.FunctionCall, call_parcel: AnonymousFile | None, *, in_cell: bool
    ) -> None:
        config = ranks.plan.config
        self.ranks = ranks
        self.name = name
        self.arguments = describe_arguments(*call)
        self.launched = time.monotonic()
        self.started = time.time()
        self.id = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(self.started))}-{_slug(name)}-{secrets.token_hex(3)}"
        kept_in = f"open_run({self.id!r}).logs(rank)" if in_cell and config.runs_folder else "run.logs(rank)"
        self.output = RunOutput(config, ranks.plan.num_processes, kept_in=kept_in)
        self.live = LiveRecords(self.launched)
        self.gpus = GpuMeter(ranks.plan.gpus)
        self.hangs = HangWatch(None)
        self.stopped_in = ""
        """Where the ranks were when the user stopped the run, if one of them waited in a collective."""
        self._progress = ProgressLine(self.launched)
        self.attempt: Attempt | None = None
        self.asking: set[int] = set()
        self.asked_to_stop = False
        self._asked_at = math.inf
        self._at_once = False
        self.outcome: RunOutcome | None = None
        self.over = over = Latch[None]()
        self.questions = Questions(lambda: over.is_set)  # Not by `self`: that would be a cycle.
        self._call: travel.FunctionCall | None = call
        self._call_parcel = call_parcel
        self._in_cell = in_cell
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.restarts = 0
        self._stacks: Stacks | None = None
        if not ranks.announced:
            ranks.announced = True
            self.output.headline(f"{name}: {ranks.plan.summary}")
        self._recorder = Recorder(LiveRunReader(self), config.runs_folder, self.launched, self._say)
        if ranks.plan.num_processes > 1 and (notice := travel.describe_generators(*call)):
            self.output.headline(notice)
        if stale := travel.stale_modules(None if call_parcel is None else call_parcel.fileno()):
            forked = config.start_method == "fork"
            version = "ranks are forked from it and run it as it was" if forked else "ranks run the file as it is now"
            self.output.notice(f"{', '.join(stale)} changed since the kernel imported it: {version}")
        self._claim = threading.Lock()
        self._thread: threading.Thread | None = None

    def own(self) -> None:
        """Answer for the ranks, even if an interrupt keeps the run from ever beginning."""
        self._forgotten = weakref.finalize(self, _let_go, self.ranks)
        self._forgotten.atexit = False

    def begin(self) -> None:
        """Start the run's thread; again where an interrupt may have cut that short.

        Raises:
            ResourceError: There is no room for a thread. The ranks are gone.
        """
        if self._thread is not None:
            return
        try:
            threading.Thread(target=self._conduct, name=f"notebook-launcher {self.name}", daemon=True).start()
        except RuntimeError as error:
            msg = (
                f"the run's thread could not be started: {error}. The limit on processes, which counts threads, may be "
                "reached (`ulimit -u`, or the container's pids limit), or that on memory (`ulimit -v`); use fewer "
                "ranks, or end what else runs."
            )
            failure = ResourceError(errno.EAGAIN, msg)
            self._finish(self._give_up(failure))
            raise failure from error

    def join(self) -> None:
        """Wait until the thread of a run that is over has ended, too."""
        if self._thread is not None:
            self._thread.join()

    def command(self, command: Command) -> None:
        """Ask for something; from any thread. What comes too late is refused."""
        if isinstance(command, Stop):
            self.asked_to_stop = True
            self._asked_at = min(self._asked_at, time.monotonic())
            self._at_once = self._at_once or command.at_once
        self._commands.put(command)
        self.ranks.wake()

    def _conduct(self) -> None:
        if not self._claim.acquire(blocking=False):
            return  # `begin` was called again before the first thread had got here.
        self._thread = threading.current_thread()
        try:
            outcome = self._conclude(self._run_attempts())
        except BaseException as fault:  # noqa: BLE001 - a fault of ours must reach the cell, not vanish with the thread
            outcome = self._give_up(fault)
        self._finish(outcome)

    def _give_up(self, fault: BaseException) -> RunOutcome:
        with contextlib.suppress(Exception):
            self.ranks.close()
        return fault_of_ours(fault, self.ranks.plan, seconds=time.monotonic() - self.launched)

    def _finish(self, outcome: RunOutcome) -> None:
        try:
            self._say_end(outcome)
        finally:
            # Whoever waits must be told, whatever happens.
            self._forgotten.detach()
            if self._call_parcel is not None:
                self._call_parcel.close()
            self._call = self._call_parcel = None
            self.outcome = outcome
            self._refuse_commands()
            self.gpus.close()
            self._recorder.finish(failed=outcome.error is not None)
            outcome.results.folder = self._recorder.folder
            self.over.set()
            self.questions.close()
            del self._recorder  # It knows this conductor; in a cycle, the logs' files would stay open for long.

    def _run_attempts(self) -> Attempt:
        limit = self.ranks.plan.config.max_restarts
        may_be_born_again = True
        while True:
            attempt = self._attempt_once()
            was_stopped = attempt.ladder is not None
            if attempt.supervisor_lost is not None and not (attempt.started or was_stopped) and may_be_born_again:
                # The fork server, or an idle session's supervisor, died before anybody noticed.
                may_be_born_again = False
                if self.ranks.many_calls:
                    self.output.notice("the session's ranks were gone; all were started anew")
                self.ranks.start(self._call)
                continue
            failed = any(outcome.failed for outcome in attempt.outcomes.values()) or attempt.supervisor_lost is not None
            if not failed or self.restarts >= limit or self.asked_to_stop or attempt.timed_out:
                return attempt
            self.restarts += 1
            outcome = self._conclude(attempt)
            self.output.notice(
                f"{self.name}: attempt {self.restarts} {brief(outcome.error, outcome.results.seconds)}; "
                f"starting again ({self.restarts} of {limit} restarts)"
            )
            self.ranks.start(self._call)

    def _attempt_once(self) -> Attempt:
        tree = self.ranks.tree
        assert tree is not None
        run_call = self.ranks.next_call(restart_count=self.restarts, can_ask=self._in_cell)
        timeout = self.ranks.plan.config.timeout
        deadline = None if timeout is None else self.launched + timeout
        call_parcel_fd = None if self._call_parcel is None else self._call_parcel.fileno()
        attempt = self.attempt = Attempt(tree, run_call, call_parcel_fd, deadline=deadline)
        self.asking.clear()
        self._stacks = None
        # A rank alone has nobody to wait for.
        self.hangs = HangWatch(self.ranks.plan.config.hang_notice if self.ranks.plan.num_processes > 1 else None)
        self._replace_the_dead(tree, attempt)
        attempt.begin()
        while not attempt.settled:
            self._obey(attempt)
            for event in tree.events(self._patience(attempt)):
                self._take(event, attempt)
            self._obey(attempt)
            attempt.act(self._look_at_stacks)
            self._watch_for_hangs(tree, attempt)
            self.output.publish()
            self._recorder.tick(time.monotonic())
        self.hangs.rest()
        self._settle(attempt)
        return attempt

    def _watch_for_hangs(self, tree: ProcessTree, attempt: Attempt) -> None:
        now = time.monotonic()
        if attempt.is_ending or self.asking:
            self.hangs.rest()
        if attempt.is_ending or self.asking or self.hangs.next_due(now) != 0:
            return
        pids = {rank: pid for rank, pid in tree.pids.items() if rank in attempt.running}
        if line := self.hangs.look(now, pids, attempt.absent, tree.dump_stacks):
            self.output.notice(line)

    def _replace_the_dead(self, tree: ProcessTree, attempt: Attempt) -> None:
        """Replace ranks of a session that died while nobody was looking."""
        if not self.ranks.many_calls:
            return
        until = time.monotonic() + DEATH_NOTICE
        while (events := tree.events(0)) or (tree.is_dying and time.monotonic() < until):
            for event in events or tree.events(DEATH_NOTICE):
                self._take(event, attempt)
        if attempt.outcomes and attempt.supervisor_lost is None:
            self._mend(attempt)
            attempt.forget_outcomes(self.ranks.generation)

    def _patience(self, attempt: Attempt) -> float | None:
        now = time.monotonic()
        deadline = attempt.next_deadline()
        due = None if deadline is None else max(0.0, deadline - now)
        waits = [self.output.next_due(now), self._recorder.next_due(now), self.hangs.next_due(now), due]
        return min((wait for wait in waits if wait is not None), default=None)

    def _settle(self, attempt: Attempt) -> None:
        """End the processes, or make them ready for the next call."""
        tree = self.ranks.tree
        assert tree is not None
        failed = any(outcome.failed for outcome in attempt.outcomes.values())
        for rank in range(self.ranks.plan.num_processes):
            for event in tree.drain(rank):
                self._take(event, attempt)
        if attempt.supervisor_lost is not None:
            self.ranks.close()
            return
        if self.ranks.many_calls:
            self._mend(attempt)
            return
        began = time.monotonic()
        for events in self.ranks.finish(lambda: self._exit_deadline(began, failed=failed)):
            for event in events:
                self._take(event, attempt)
            self.output.publish()
        when = "as the run was stopped" if self.asked_to_stop else f"{EXIT_BUDGET:g} s after it returned"
        for rank in tree.pids:
            attempt.outcomes[rank].after_stop = True
            if not failed:
                text = f"rank {rank} was killed: {when} it was still running exit handlers or threads"
                self.output.notice(text, "stderr")
        self.ranks.close()

    def _exit_deadline(self, began: float, *, failed: bool) -> float:
        if self._at_once:
            return began
        usual = began + (FAILED_EXIT_BUDGET if failed else EXIT_BUDGET)
        return min(usual, max(began, self._asked_at) + FAILED_EXIT_BUDGET)

    def _mend(self, attempt: Attempt) -> None:
        replaced = self.ranks.mend(attempt)
        if replaced:
            listed = ", ".join(str(rank) for rank in replaced)
            self.output.notice(
                f"rank{'s' * (len(replaced) > 1)} {listed} had ended and {'was' if len(replaced) == 1 else 'were'} "
                "started anew, with nothing of the earlier runs in memory"
            )
        elif attempt.broke_group:
            self.output.notice(
                "the process group is made anew for the next run: models that the ranks keep must be wrapped again "
                "(DistributedDataParallel, Accelerator.prepare)"
            )

    def _take(self, event: Event, attempt: Attempt) -> None:
        match event:
            case Output():
                self.output.feed(event)
                self._recorder.note()
            case FromRank(rank, messages.Display() | messages.ClearOutput() as record, _):
                self.output.show(rank, record)
            case FromRank(rank, messages.InputRequest() as record, _):
                self._ask(rank, record, attempt)
            case FromRank(rank, messages.Metrics() | messages.Progress() | messages.Phases() as record, _):
                self.live.fold(rank, record)
                self._progress.update(self)
                self._recorder.note()
            case FromRank(_, messages.Notice() as record, _):
                self.output.notice(record.text)
            case FromRank(rank, messages.Unreadable() as record, _):
                text = f"rank {rank} sent something that cannot be read in the kernel ({record.reason})"
                self.output.notice(text, "stderr")
        attempt.fold(event)

    def _ask(self, rank: int, request: messages.InputRequest, attempt: Attempt) -> None:
        self.asking.add(rank)
        attempt.pause(paused=True)
        self.output.publish(force=True)
        self.questions.put(Question(rank, request, attempt.call_id))

    def _obey(self, attempt: Attempt) -> None:
        while not self._commands.empty():
            match self._commands.get():
                case Stop(after_step=True) if attempt.ladder is None and attempt.ask_to_stop():
                    pass
                case Save(answered):
                    answered.set(attempt.ask_to_save())
                case Stop(at_once):
                    if attempt.ladder is None and not at_once:
                        self._show_who_waits()
                    attempt.stop(at_once=at_once)
                case Answer(rank, reply, call_id):
                    if call_id != attempt.call_id:
                        continue  # To a question of a rank that has been started anew since.
                    attempt.tree.send(rank, reply)
                    self.asking.discard(rank)
                    attempt.pause(paused=bool(self.asking))
                case wanted:
                    wanted.set(self._look_at_stacks())

    def _look_at_stacks(self) -> Stacks:
        assert self.ranks.tree is not None
        self._stacks = Stacks.parse(self.ranks.tree.dump_stacks())
        self.hangs.forgive()
        return self._stacks

    def _show_who_waits(self) -> None:
        stacks = self._look_at_stacks()
        if any(stack.waiting_in for stack in stacks):
            self.stopped_in = stacks.past_verdict
            self.output.notice(stacks.in_past_tense)

    def _refuse_commands(self) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            latch = command.answered if isinstance(command, Save) else command
            if isinstance(latch, Latch):
                latch.set(None)

    def _conclude(self, attempt: Attempt) -> RunOutcome:
        return conclude(
            attempt,
            self.ranks.plan,
            launched=self.launched,
            ended=time.monotonic(),
            restarts=self.restarts,
            asked_to_stop=self.asked_to_stop,
            stacks=self._stacks,
            last_lines=self.output.last_lines,
            last_values=self.live.last_values,
        )

    def _say(self, text: str) -> None:
        self.output.notice(text, "stderr")
        self.output.publish(force=True)

    def _say_end(self, outcome: RunOutcome) -> None:
        seconds = outcome.results.seconds
        if outcome.state == "failed":
            text = brief(outcome.error, seconds, is_raised=self._in_cell)
        elif self.asked_to_stop:
            text = f"stopped after {format_seconds(seconds)}" + (
                mishaps(outcome.results.failures) if outcome.error is not None else "; every rank had returned"
            )
        else:
            text = f"done in {format_seconds(seconds)}"
        self.output.end(f"{self.name}: {text}")


def _let_go(ranks: Ranks) -> None:
    if not ranks.many_calls:
        ranks.close()


def _slug(name: str) -> str:
    """Return a name as a part of a file name."""
    return re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")[:40] or "run"
