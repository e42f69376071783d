"""Carries out the commands that other threads send to a run's thread."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from notebook_launcher.kernel.display.questions import Answer
from notebook_launcher.kernel.inspection.mismatches import suggestion
from notebook_launcher.kernel.run.commands import (
    ChangeCommand,
    EndSamplingCommand,
    ProfileCommand,
    SampleCommand,
    SaveCommand,
    StacksCommand,
    StopCommand,
)

if TYPE_CHECKING:
    from notebook_launcher.kernel.inspection.inspector import RankInspector
    from notebook_launcher.kernel.inspection.profile_requests import ProfileRequests
    from notebook_launcher.kernel.inspection.stacks import Stacks
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.kernel.run.commands import Command
    from notebook_launcher.kernel.run.data import RunData

__all__ = ["CommandHandler"]


class CommandHandler:
    """Carries out commands, in the run's thread.

    Args:
        data: The run data, with the queue of commands.
        inspector: Reads the ranks' stacks.
        profiles: Takes requests for profiles.
    """

    def __init__(self, data: RunData, inspector: RankInspector, profiles: ProfileRequests) -> None:
        self._data = data
        self._inspector = inspector
        self._profiles = profiles

    def carry_out_all(self, attempt: Attempt) -> None:
        """Carry out the commands that other threads have sent since the last call."""
        for command in self._data.commands.take_all():
            self._carry_out(command, attempt)

    def _carry_out(self, command: Command, attempt: Attempt) -> None:
        match command:
            case StopCommand():
                self._stop(command, attempt)
            case SaveCommand():
                command.answer.set(attempt.requests.ask_to_save())
            case ChangeCommand(action, values, source):
                command.answer.set(attempt.requests.ask_to_change(action, values, source))
            case StacksCommand():
                command.answer.set(self._read_stacks(attempt))
            case SampleCommand():
                command.answer.set(self._inspector.take_sample(attempt))
            case EndSamplingCommand(starts):
                command.answer.set(attempt.tree.stacks.read(starts))
            case ProfileCommand():
                self._profiles.begin(command, attempt.requests, self._data.live.settings.trainer)
            case Answer():
                self._answer(command, attempt)

    def _stop(self, command: StopCommand, attempt: Attempt) -> None:
        is_first = attempt.ladder is None
        if command.after_step and is_first and attempt.requests.ask_to_stop(attempt.state.unsettled):
            return
        kill_asked_at = self._data.commands.kill_asked_at
        if is_first and attempt.state.debugged is None and math.isinf(kill_asked_at):
            self._show_waits(attempt)
        attempt.stop(at_once=command.at_once, asked_at=kill_asked_at if command.at_once else None)

    def _show_waits(self, attempt: Attempt) -> None:
        """Show a notice about the ranks that wait in a collective, before a stop ends the wait."""
        data, stacks = self._data, self._read_stacks(attempt)
        if not any(stack.waiting_in for stack in stacks):
            return
        data.stopped_in = stacks.past_verdict
        data.output.headline(stacks.in_past_tense)
        plan = data.plan
        if hint := suggestion(stacks, is_checked=plan.config.check_collectives, backend=plan.backend):
            data.output.notice(hint)

    def _read_stacks(self, attempt: Attempt) -> Stacks:
        stacks = self._inspector.read_stacks(attempt)
        self._data.note_stacks(stacks)
        return stacks

    def _answer(self, answer: Answer, attempt: Attempt) -> None:
        if answer.call_id != attempt.call_id:
            return  # The rank that asked has been started again since.
        attempt.tree.send(answer.rank, answer.reply)
        self._data.note_answer(answer.rank)
        if not self._data.asking:
            attempt.release_clock()
