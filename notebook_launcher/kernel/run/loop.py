"""The loop of a run's thread: waits for events of the process tree and for commands, and writes the run data."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from notebook_launcher import messages
from notebook_launcher.engines.events import FromRank, Output, RankLost
from notebook_launcher.kernel.display.formatting import one_line
from notebook_launcher.kernel.display.progress_line import ProgressLine
from notebook_launcher.kernel.inspection.hangs import HangWatch
from notebook_launcher.kernel.inspection.mismatches import suggestion
from notebook_launcher.kernel.inspection.profiles import PendingProfile
from notebook_launcher.kernel.inspection.stacks import Stacks
from notebook_launcher.kernel.ranks import describe_restart
from notebook_launcher.kernel.run.attempt import Attempt
from notebook_launcher.kernel.run.commands import (
    ChangeCommand,
    ProfileCommand,
    SampleCommand,
    SaveCommand,
    StacksCommand,
    StopCommand,
)
from notebook_launcher.kernel.run.conclusion import describe_failure
from notebook_launcher.kernel.run.live_values import describe_change
from notebook_launcher.kernel.run.questions import Answer, Question
from notebook_launcher.kernel.run.restarts import restart

if TYPE_CHECKING:
    from notebook_launcher.engines.events import Event
    from notebook_launcher.history.recorder import Recorder
    from notebook_launcher.kernel.hosting import TakesQuestions
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.commands import Command
    from notebook_launcher.kernel.run.data import RunData
    from notebook_launcher.kernel.run.questions import Questions
    from notebook_launcher.kernel.run.rank_outcome import RankOutcome
    from notebook_launcher.travel import FunctionCall

__all__ = ["EXIT_BUDGET", "RunLoop"]

EXIT_BUDGET = 5.0
"""Seconds that ranks get to run their exit handlers after a success."""
FAILED_EXIT_BUDGET = 0.5
"""Seconds that ranks get for their exit handlers after a failure, or once the run is being stopped."""
DEATH_NOTICE = 1.0
"""Seconds that the supervisor gets to report the exit status of a rank whose channel has closed."""


class RunLoop:
    """Carries out the attempts at one call; used in the run's thread alone.

    Args:
        data: The run data, which the loop writes.
        ranks: The ranks that serve the run.
        call: The function and its arguments, for ranks that are started again and inherit the call by a fork.
        parcel_fd: Descriptor of the packed call; None if the ranks inherit the call by a fork.
        questions: Takes what ranks ask the user.
        recorder: Writes the run's folder.
        can_ask: True if the user can answer: a cell waits for the run, or clients may attach to it.
    """

    def __init__(
        self,
        data: RunData,
        ranks: Ranks,
        call: FunctionCall | None,
        parcel_fd: int | None,
        questions: Questions | TakesQuestions,
        recorder: Recorder,
        *,
        can_ask: bool,
    ) -> None:
        self._data = data
        self._ranks = ranks
        self._call = call
        self._parcel_fd = parcel_fd
        self._questions = questions
        self._recorder = recorder
        self._can_ask = can_ask
        self._progress = ProgressLine(data)
        self._has_live = False
        """True if ranks have reported since the line of progress was updated."""
        self._profile: PendingProfile | None = None
        """The profile that was asked for and is not complete."""
        self._hangs = HangWatch(None)
        """Replaced at each attempt, since an attempt begins with nothing known of its ranks."""

    def run(self) -> None:
        """Repeat the call until an attempt succeeds, is stopped, or no restart is left."""
        with self._ranks.comms.served(self._ranks.wake):
            self._repeat()

    def _repeat(self) -> None:
        data, limit = self._data, self._data.plan.config.max_restarts
        may_start_silently = True
        while True:
            attempt = self._run_attempt()
            has_begun = bool(attempt.state.started) or attempt.ladder is not None
            if attempt.state.tree_lost and not has_begun and may_start_silently:
                # The fork server, or an idle session's supervisor, died unnoticed before this run.
                may_start_silently = False
                attempt.state.close()
                if self._ranks.many_calls:
                    data.output.notice("the session's ranks had died and were restarted")
                self._ranks.start(self._call)
                continue
            if not attempt.state.failed or data.restarts >= limit or data.commands.asked_to_stop or attempt.timed_out:
                return
            data.restarts += 1
            data.output.notice(
                f"{data.name}: attempt {data.restarts} {describe_failure(data)}; "
                f"starting again ({data.restarts} of {limit} restarts)"
            )
            attempt.state.close()
            restart(data, self._ranks, self._call)

    def _run_attempt(self) -> Attempt:
        attempt = self._new_attempt()
        self._replace_the_dead(attempt)
        attempt.begin()
        while not attempt.settled:
            self._carry_out_commands(attempt)
            for event in attempt.tree.events(self._patience(attempt)):
                self._handle(event, attempt)
            if self._has_live:
                self._has_live = False
                attempt.note_activity()
                self._progress.update()
            self._carry_out_commands(attempt)
            if (failure := attempt.failure_to_debug()) is not None:
                self._debug(failure, attempt)
            attempt.act(lambda: self._read_stacks(attempt))
            self._watch_for_hangs(attempt)
            self._data.output.publish()
            self._ranks.comms.publish(time.monotonic())
            self._ranks.comms.send_pending(attempt.tree)
            self._data.usage.tick(time.monotonic(), attempt.tree, self._data.gpus)
            self._recorder.tick(time.monotonic())
        self._reset_hangs()
        self._settle(attempt)
        return attempt

    def _new_attempt(self) -> Attempt:
        data, tree = self._data, self._ranks.tree
        assert tree is not None
        config = data.plan.config
        run_call = self._ranks.next_call(
            data.scope,
            restart_count=data.restarts,
            can_ask=self._can_ask,
            widget_ranks=data.output.choose_widget_ranks(data.scope.widget_ranks),
            checkpoints=tuple(data.checkpoints),
        )
        deadline = None if config.timeout is None else data.launched + config.timeout
        data.attempt = Attempt(
            tree,
            run_call,
            self._parcel_fd,
            deadline=deadline,
            idle_timeout=config.idle_timeout,
            debug=config.debug,
        )
        data.asking.clear()
        data.stacks = None
        self._give_up_profile()
        data.live.forget_settings()  # Ranks that were started again have their first ones.
        # A single rank has no other rank to wait for.
        notice_after = data.scope.notice_after(config.hang_notice) if data.plan.num_processes > 1 else None
        self._hangs = HangWatch(notice_after, time.monotonic(), uses_gpu=data.plan.use_gpu)
        return data.attempt

    def _watch_for_hangs(self, attempt: Attempt) -> None:
        now = time.monotonic()
        if attempt.is_ending or self._data.asking or attempt.requests.paused_after is not None:
            self._reset_hangs()
            return
        if self._hangs.next_due(now) != 0:
            return
        tree = attempt.tree
        line = self._hangs.poll(now, lambda: tree.pulses(attempt.state.running), attempt.state.absent, tree.dump_stacks)
        self._data.hang = self._hangs.hang
        if line:
            self._data.output.notice(line)

    def _reset_hangs(self) -> None:
        self._hangs.reset()
        self._data.hang = None

    def _replace_the_dead(self, attempt: Attempt) -> None:
        """Replace ranks of a session that died between two runs."""
        if not self._ranks.many_calls:
            return
        tree, until = attempt.tree, time.monotonic() + DEATH_NOTICE
        while (events := tree.events(0)) or (tree.is_dying and time.monotonic() < until):
            for event in events or tree.events(DEATH_NOTICE):
                self._handle(event, attempt)
        if attempt.state.outcomes and not attempt.state.tree_lost:
            self._mend(attempt)
            attempt.forget_outcomes(self._ranks.generation)

    def _patience(self, attempt: Attempt) -> float | None:
        """Return the seconds until something is due even if nothing happens; None: nothing is."""
        now = time.monotonic()
        deadline = attempt.next_deadline()
        due = None if deadline is None else max(0.0, deadline - now)
        waits = [self._data.output.next_due(now), self._recorder.next_due(now), self._hangs.next_due(now), due]
        waits += [self._ranks.comms.next_due(now), self._data.usage.next_due(now)]
        return min((wait for wait in waits if wait is not None), default=None)

    def _settle(self, attempt: Attempt) -> None:
        """End the processes, or make them ready for the next call."""
        for rank in range(self._data.plan.num_processes):
            for event in attempt.tree.drain(rank):
                self._handle(event, attempt)
        self._ranks.comms.publish(None)
        if attempt.state.tree_lost:
            self._ranks.close()
        elif self._ranks.many_calls:
            self._mend(attempt)
        else:
            self._end_ranks(attempt)

    def _end_ranks(self, attempt: Attempt) -> None:
        failed, began = attempt.state.failed, time.monotonic()
        output = self._data.output
        for events in self._ranks.finish(lambda: self._exit_deadline(began, failed=failed)):
            for event in events:
                self._handle(event, attempt)
            output.publish()
        asked_to_stop = self._data.commands.asked_to_stop
        when, hint = f"{EXIT_BUDGET:g} s after it returned", ". Finish such work in the function, a save for example"
        if asked_to_stop:
            when, hint = "as the run was stopped", ""
        for rank in attempt.tree.pids:
            outcome = attempt.state.outcomes[rank]
            outcome.after_stop = outcome.after_stop or not outcome.failed  # What it raised came before.
            if not failed:
                text = f"rank {rank} was killed: {when} it was still running exit handlers or threads{hint}"
                output.notice(text, "stderr")
        self._ranks.close()

    def _exit_deadline(self, began: float, *, failed: bool) -> float:
        commands = self._data.commands
        if commands.stops_at_once:
            return began
        usual = began + (FAILED_EXIT_BUDGET if failed else EXIT_BUDGET)
        return min(usual, max(began, commands.stop_asked_at) + FAILED_EXIT_BUDGET)

    def _mend(self, attempt: Attempt) -> None:
        self._remove_the_spent(attempt)
        replaced = self._ranks.mend(attempt)
        if replaced:
            in_nccl = attempt.ladder is not None and "nccl" in (attempt.tree.setup.backend or "")
            self._data.output.notice(describe_restart(replaced, stopped_in_nccl=in_nccl))
        elif attempt.state.broke_group:
            self._data.output.notice(
                "the next run makes a new process group: models that the ranks keep must be wrapped again "
                "(DistributedDataParallel, Accelerator.prepare)"
            )

    def _remove_the_spent(self, attempt: Attempt) -> None:
        """End ranks whose GPU context was lost: their CUDA calls would fail in all later calls of the session."""
        spent = tuple(rank for rank, outcome in attempt.state.outcomes.items() if outcome.is_spent)
        if not spent:
            return
        attempt.tree.signal(spent, signal.SIGKILL)
        until = time.monotonic() + DEATH_NOTICE
        while any(attempt.state.outcomes[rank].is_spent for rank in spent) and (left := until - time.monotonic()) > 0:
            for event in attempt.tree.events(left):
                self._handle(event, attempt)

    def _handle(self, event: Event, attempt: Attempt) -> None:
        data = self._data
        match event:
            case Output():
                data.output.feed(event)
                self._recorder.note()
            # These records are matched first, because a thousand ranks send tens of thousands of them per second.
            case FromRank(
                rank, messages.Metrics() | messages.Picture() | messages.Progress() | messages.Phases() as record, _
            ):
                data.live.fold(rank, record)
                self._has_live = True
                self._recorder.note()
                return
            case FromRank(rank, messages.Display() | messages.ClearOutput() as record, _):
                self._ranks.comms.publish(None)
                data.output.show(rank, record)
            case FromRank(rank, messages.CommMessage() | messages.CommHandled() as record, _):
                self._ranks.comms.take(rank, record, data.output.sink)
            case FromRank(rank, messages.InputRequest() as record, _):
                self._ask(rank, record, attempt)
            case FromRank(_, messages.Notice(text=text), _):
                data.output.notice(text)
            case FromRank(
                _,
                messages.CheckpointSaved() | messages.Offered() | messages.Changed() | messages.Profiled() as record,
                _,
            ):
                self._note_training(record, attempt)
            case FromRank(rank, messages.Unreadable() as record, _):
                text = f"rank {rank} sent a record that the kernel could not unpickle ({record.reason})"
                data.output.notice(text, "stderr")
            case FromRank(rank, messages.DebugEnded(), _) | RankLost(messages.RankExited(rank=rank)):
                attempt.end_debugging(rank)
        attempt.fold(event)

    def _note_training(
        self,
        record: messages.CheckpointSaved | messages.Offered | messages.Changed | messages.Profiled,
        attempt: Attempt,
    ) -> None:
        """Note a checkpoint, a setting that can be changed, or what ranks did because they were asked to."""
        data = self._data
        match record:
            case messages.CheckpointSaved(folder=folder):
                data.checkpoints = [*(each for each in data.checkpoints if each != folder), folder]
            case messages.Offered(name=name, value=value):
                data.live.tunables.setdefault(name, value)
            case messages.Changed():
                data.live.note_change(record)
                attempt.note_change(record)
                if line := describe_change(record):
                    data.output.notice(line)
                self._recorder.note()
            case messages.Profiled():
                self._note_profile(record)

    def _note_profile(self, record: messages.Profiled) -> None:
        if self._profile is None:
            return
        self._profile.note(record)
        if self._profile.answer.is_set:
            self._profile = None

    def _debug(self, failure: RankOutcome, attempt: Attempt) -> None:
        """Let the user look into the frames of the rank that failed first, before the others are stopped."""
        rank = failure.rank
        if failure.raised is None or failure.exited is not None:
            self._data.output.notice(f"debug=True: the process of rank {rank} has ended; no frames are left to debug")
            return
        self._data.output.notice(
            f"rank {rank} failed: {one_line(failure.raised.report)}. The other ranks stay as they are; q ends the run."
        )
        self._data.output.show_rank(rank)
        attempt.begin_debugging(rank)

    def _ask(self, rank: int, request: messages.InputRequest, attempt: Attempt) -> None:
        if rank == attempt.state.debugged and attempt.ladder is not None:
            # The run is being stopped, so the debugger ends.
            reply = messages.InputReply(text=None, reason="the run was stopped", number=request.number)
            attempt.tree.send(rank, reply)
            return
        self._data.asking.add(rank)
        attempt.pause(paused=True)
        self._data.output.publish(force=True)
        self._questions.put(Question(rank, request, attempt.call_id))

    def _carry_out_commands(self, attempt: Attempt) -> None:
        for command in self._data.commands.take_all():
            self._carry_out(command, attempt)

    def _carry_out(self, command: Command, attempt: Attempt) -> None:
        match command:
            case StopCommand():
                self._stop(command, attempt)
            case SaveCommand(answer):
                answer.set(attempt.requests.ask_to_save())
            case ChangeCommand(action, values, answer, source):
                answer.set(attempt.requests.ask_to_change(action, values, source))
            case SampleCommand():
                self._sample(command, attempt)
            case ProfileCommand():
                self._begin_profile(command, attempt)
            case StacksCommand(answer):
                answer.set(self._read_stacks(attempt))
            case Answer():
                self._answer(command, attempt)

    def _stop(self, command: StopCommand, attempt: Attempt) -> None:
        is_first = attempt.ladder is None
        if command.after_step and is_first and attempt.requests.ask_to_stop(attempt.state.unsettled):
            return
        if is_first and not command.at_once and attempt.state.debugged is None:
            self._show_who_waits(attempt)
        attempt.stop(at_once=command.at_once)

    def _answer(self, answer: Answer, attempt: Attempt) -> None:
        if answer.call_id != attempt.call_id:
            return  # The rank that asked has been started again since.
        attempt.tree.send(answer.rank, answer.reply)
        self._data.asking.discard(answer.rank)
        attempt.pause(paused=bool(self._data.asking))

    def _read_stacks(self, attempt: Attempt) -> Stacks:
        dumps = attempt.tree.dump_stacks()
        self._data.stacks = stacks = Stacks.parse(dumps, uses_gpu=self._data.plan.use_gpu)
        self._hangs.forgive()
        return stacks

    def _sample(self, command: SampleCommand, attempt: Attempt) -> None:
        if command.starts is not None:
            command.answer.set(attempt.tree.read_stacks(command.starts))
            return
        command.answer.set(attempt.tree.stacks_sizes())
        attempt.tree.request_stacks()
        self._hangs.forgive()

    def _begin_profile(self, command: ProfileCommand, attempt: Attempt) -> None:
        if self._profile is not None:
            command.answer.set(
                "this run is being profiled already. Wait for that profile, then call run.profile() again."
            )
            return
        folder = self._recorder.folder
        order = messages.ProfileOrder(
            ranks=command.ranks, updates=command.updates, folder=None if folder is None else str(folder)
        )
        if attempt.requests.ask_to_change("profile", profile=order):
            self._profile = PendingProfile(command.ranks, command.answer)
            return
        command.answer.set(
            "no Accelerator has made an update in this run yet, so there is nothing to profile. Prepare the model and "
            "the optimizer with Accelerator().prepare(...), and try again after the first update; run.sample(seconds) "
            "shows where the time of any function goes."
        )

    def _give_up_profile(self) -> None:
        if self._profile is not None:
            self._profile.answer.set("the ranks ended before the profile was complete")
            self._profile = None

    def _show_who_waits(self, attempt: Attempt) -> None:
        stacks = self._read_stacks(attempt)
        if any(stack.waiting_in for stack in stacks):
            self._data.stopped_in = stacks.past_verdict
            self._data.output.notice(stacks.in_past_tense)
            plan = self._data.plan
            if hint := suggestion(stacks, is_checked=plan.config.check_collectives, backend=plan.backend):
                self._data.output.notice(hint)
