"""One call on one process tree, from the moment it is sent until every rank has settled.

A rank has settled when it waits for the next call or its process has exited. `Attempt` folds events into the
outcome of each rank and decides three things: when a failure or a request to stop ends the call on all ranks,
which rung of the ladder is needed for that, and when all ranks have settled.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from notebook_launcher import context, messages
from notebook_launcher.engines.events import FromRank, Output, RankLost, SupervisorLost, Woken
from notebook_launcher.kernel.culprit import is_victim_like
from notebook_launcher.kernel.ladder import FAILURE_BUDGETS, USER_BUDGETS, Ladder, Rung
from notebook_launcher.kernel.rank_outcome import RankOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.changes import Wanted
    from notebook_launcher.engines.events import Event
    from notebook_launcher.engines.process_tree import ProcessTree

__all__ = ["Attempt", "ChangeAction", "ChangeSource"]

ChangeAction: TypeAlias = Literal["set", "pause", "resume", "save", "stop"]
ChangeSource: TypeAlias = Literal["code", "monitor"]

SURE_GRACE = 0.15
"""Seconds that other ranks get to report their own failure, if the first failure is surely a cause."""
SESSION_GRACE = 0.15
"""Seconds that the ranks of a session get to end a call that is being stopped. After them, ranks that have ended the
call leave the process group, which breaks the group; models that are wrapped with the group are worth keeping."""
RETURN_GRACE = 1.0
"""Seconds after which a rank that has returned leaves the process group while others have not returned. Under torchrun
the rank's process would have exited, and peers that wait for it in a collective would get an error."""
IDLE = "runs nothing, so this waits for ever: interrupt it, and run the cell on all ranks"
VICTIM_GRACE = 1.0
"""Seconds that other ranks get to report their own failure, if the first failure looks like a consequence of another
one (for example "connection reset")."""


class Attempt:
    """One try at a call: knows each rank's outcome, and decides when and how the call is stopped.

    Used in the run's thread alone; other threads may read its public attributes.
    """

    def __init__(
        self, tree: ProcessTree, call: messages.RunCall, parcel_fd: int | None, *, deadline: float | None, debug: bool
    ) -> None:
        self.tree = tree
        """The ranks' processes."""
        self.outcomes: dict[int, RankOutcome] = {}
        """By rank, for each rank on which the call has ended."""
        self.started: set[int] = set()
        """The ranks that have begun the function."""
        self.ladder: Ladder | None = None
        """The present stop; None while no stop is under way."""
        self.timed_out = False
        """True if the run exceeded `LaunchConfig.timeout`."""
        self.supervisor_lost: str | None = None
        """The reason why the supervisor is gone; None while it lives."""
        self.not_started: messages.RankNotStarted | None = None
        """The first rank that could not be started."""
        self._call = call
        self._parcel_fd = parcel_fd
        """Descriptor of the packed call; None if the ranks inherit the call by a fork."""
        self._deadline = deadline
        """Time at which the run is stopped, by `time.monotonic()`, as are the times below."""
        self._paused_at: float | None = None
        """Time since which a rank waits for the user's input, which stops the clock of `_deadline`."""
        self._fail_at: float | None = None
        """Time at which the other ranks are stopped, because one has failed."""
        self._asked_at: float | None = None
        """Time at which the ranks were first asked to stop after their step."""
        self._leave_at: float | None = None
        """Time at which ranks that have ended the call leave the process group."""
        self._left: set[int] = set()
        """The ranks that were told to leave the process group."""
        self.paused_after: int | None = None
        """Number of updates after which all ranks are held; None while they train."""
        self._num_changes = 0
        """Number of the last change that was sent."""
        self.debugged: int | None = None
        """The rank whose frames the user looks into; nobody is stopped and no clock runs meanwhile."""
        self._may_debug = debug
        """True until the first failure has been looked into."""
        self._stop_grace = SESSION_GRACE if tree.setup.many_calls else 0.0
        self._num_processes = tree.setup.num_processes
        self._doomed: set[int] = set()
        """The ranks that were sent SIGKILL."""

    def begin(self) -> None:
        """Send the call; a rank that is not up yet finds the call in its channel."""
        self.tree.board[:] = bytes(context.BOARD_SIZE)
        for rank in range(self._num_processes):
            self.tree.send(rank, self._call, [] if self._parcel_fd is None else [self._parcel_fd])

    def discard_outcomes(self) -> None:
        """Close the parcels of an attempt whose outcomes nobody will read; idempotent."""
        for outcome in self.outcomes.values():
            outcome.close()

    def forget_outcomes(self, generation: int) -> None:
        """Forget ranks that ended before the call began and have been replaced since."""
        self.outcomes.clear()
        self._fail_at = self._leave_at = None
        self._call = dataclasses.replace(self._call, generation=generation)

    @property
    def call_id(self) -> int:
        """The number of the call."""
        return self._call.call_id

    @property
    def failed(self) -> bool:
        """True if a rank gave no value, or the supervisor was lost."""
        return self.supervisor_lost is not None or any(outcome.failed for outcome in self.outcomes.values())

    @property
    def settled(self) -> bool:
        """True once every rank has settled, or the supervisor is lost."""
        return (not self.unsettled and not self._is_to_debug) or self.supervisor_lost is not None

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The ranks that have not settled."""
        return tuple(rank for rank in range(self._num_processes) if not self._has_settled(rank))

    @property
    def is_ending(self) -> bool:
        """True while the ranks are being stopped, or are about to be because one has failed."""
        return self.ladder is not None or self._fail_at is not None or self.debugged is not None

    @property
    def _is_to_debug(self) -> bool:
        """True if a failure waits to be looked into."""
        return self._may_debug and self.ladder is None and self._fail_at is not None

    def failure_to_debug(self) -> RankOutcome | None:
        """Return the first real failure once it is time to look into it, and only once; None before and after."""
        if not self._is_to_debug or (self._fail_at or 0.0) > time.monotonic():
            return None
        self._may_debug = False
        return min(self._failed(), key=lambda outcome: (_is_victim(outcome), outcome.time))

    def begin_debugging(self, rank: int) -> None:
        """Open the debugger in a rank that has failed; the others stay as they are, and clocks stop, until its end."""
        self.debugged, self._fail_at = rank, None
        self.pause(paused=True)
        self.tree.send(rank, messages.DebugFailure())

    def end_debugging(self, rank: int) -> None:
        """Go on with the usual end of a failed run, if this is the rank that was debugged."""
        if rank != self.debugged:
            return
        self.debugged = None
        self.pause(paused=False)
        self._fail_at = time.monotonic()

    @property
    def running(self) -> frozenset[int]:
        """The ranks that run the function."""
        return frozenset(self.started - self.outcomes.keys())

    @property
    def absent(self) -> dict[int, str]:
        """The ranks that do not run the function, each with its state, such as `has returned`."""
        outcomes = {rank: "has ended" if outcome.failed else "has returned" for rank, outcome in self.outcomes.items()}
        everyone = set(range(self._num_processes))
        late = everyone - self.started - self.outcomes.keys()
        idle = everyone - set(self._call.ranks) if self._call.ranks is not None else set()
        return dict.fromkeys(sorted(late), "has not started the function yet") | outcomes | dict.fromkeys(idle, IDLE)

    def _has_settled(self, rank: int) -> bool:
        # A rank that was sent SIGKILL settles only when it has exited, even if it still sent its outcome.
        if rank not in self.outcomes or rank == self.debugged:
            return False
        return rank not in self._doomed or self.outcomes[rank].is_over

    def fold(self, event: Event) -> None:
        """Record an event of the process tree."""
        match event:
            case FromRank(rank, messages.CallStarted() as record, _) if record.call_id == self._call.call_id:
                self.started.add(rank)
            case FromRank(rank, messages.Returned() as record, fds) if record.call_id == self._call.call_id:
                self._note_outcome(
                    RankOutcome(rank=rank, time=record.time, returned=record, parcel_fd=fds[0] if fds else None)
                )
            case FromRank(rank, messages.Raised() as record, fds) if record.call_id == self._call.call_id:
                self._note_outcome(
                    RankOutcome(rank=rank, time=record.time, raised=record, parcel_fd=fds[0] if fds else None)
                )
            case RankLost(exited):
                self._note_exit(exited)
            case messages.RankNotStarted():
                self.not_started = self.not_started or event
                self._note_outcome(RankOutcome(rank=event.rank, time=time.monotonic()))
            case SupervisorLost(reason):
                self.supervisor_lost = reason or "its process ended"
            case FromRank(_, _, fds):
                for fd in fds:
                    os.close(fd)
            case Output() | Woken() | messages.RankStarted():
                pass

    def _note_outcome(self, outcome: RankOutcome) -> None:
        stopping = self._asked_at if self.ladder is None or self._asked_at is not None else self.ladder.started
        outcome.after_stop = stopping is not None and outcome.time >= stopping
        outcome.pid = self.tree.pids.get(outcome.rank) if outcome.exited is None else outcome.exited.pid
        if outcome.rank in self.outcomes:
            self.outcomes[outcome.rank].close()
        self.outcomes[outcome.rank] = outcome
        if stopping is not None:
            self._leave_in(self._stop_grace)
        elif not (outcome.failed or self.tree.setup.many_calls or "nccl" in (self.tree.setup.backend or "")):
            # Not with NCCL: collectives that the rank has begun may still be running on its GPU.
            self._leave_in(RETURN_GRACE)
        if not outcome.failed or stopping is not None:
            return
        grace = VICTIM_GRACE if outcome.raised is not None and is_victim_like(outcome.raised.report) else SURE_GRACE
        fail_at = time.monotonic() + grace
        self._fail_at = fail_at if self._fail_at is None else min(self._fail_at, fail_at)

    def _note_exit(self, exited: messages.RankExited) -> None:
        known = self.outcomes.get(exited.rank)
        if known is None:
            self._note_outcome(RankOutcome(rank=exited.rank, time=exited.time, exited=exited))
        elif known.raised is not None and known.raised.is_spent:
            known.was_removed, known.pid = True, exited.pid
        else:
            known.exited, known.pid = exited, exited.pid

    def stop(self, *, at_once: bool = False) -> None:
        """Begin to stop; with `at_once` go to the last rung."""
        now = time.monotonic()
        if self.ladder is None:
            self.tree.board[context.STOP_FLAG] = context.STOP_EACH
            self._climb_onto(Ladder.start(now, USER_BUDGETS, can_ask=self._asked_at is None and self._can_ask()))
        if at_once:
            self.ladder.climb(now, to_top=True)  # type: ignore[union-attr]
            self._send_signal()

    def ask_to_stop(self) -> bool:
        """Ask the ranks to stop after their present step; return True if a rank looks at the stop flag."""
        if not self._can_ask():
            return False
        if self.paused_after is not None:
            self._asked_at = time.monotonic()
            return self.ask_to_change("stop")
        if self._asked_at is None:  # Set before the flag, so that a rank that ends because of the flag ends later.
            self._asked_at = time.monotonic()
        self.tree.board[context.STOP_FLAG] = context.STOP_TOGETHER
        return True

    def ask_to_save(self) -> bool:
        """Ask the ranks for a checkpoint; return True if an Accelerator will write it."""
        if self.paused_after is not None:
            return self.ask_to_change("save")
        board = self.tree.board
        board[context.SAVES_ASKED] = (board[context.SAVES_ASKED] + 1) % 256
        return self.can_save

    def ask_to_change(
        self, action: ChangeAction, values: dict[str, Wanted] | None = None, source: ChangeSource = "code"
    ) -> bool:
        """Ask the ranks to do something after the same update; return True if an Accelerator will do it."""
        if not self.can_save:
            return False
        self._num_changes += 1
        change = messages.Change(number=self._num_changes, action=action, values=values or {}, source=source)
        for rank in range(self._num_processes):
            self.tree.send(rank, change)
        # Written last: a rank that sees the number finds the change in its channel.
        self.tree.board[context.CHANGES_ASKED] = self._num_changes % 256
        return True

    def note_change(self, changed: messages.Changed) -> None:
        """Stop the clocks while the ranks are paused."""
        if changed.action in ("pause", "resume"):
            self.paused_after = changed.update if changed.action == "pause" else None
            self.pause(paused=False)

    @property
    def can_save(self) -> bool:
        """True if an Accelerator in the ranks acts on `ask_to_save`."""
        return bool(self.tree.board[context.HAS_SAFEPOINT])

    def activity_of(self, rank: int) -> int:
        """Return a rank's activity as it stands on the board: COMPUTING, WAITING or SAVING."""
        return int(self.tree.board[context.ACTIVITY + rank])

    def _can_ask(self) -> bool:
        first = context.COOPERATIVE
        return any(self.tree.board[first + rank] for rank in self.unsettled)

    def _climb_onto(self, ladder: Ladder) -> None:
        self.ladder = ladder
        if self.outcomes:
            self._leave_in(self._stop_grace)
        self._send_signal()

    def _leave_in(self, seconds: float) -> None:
        """Schedule that ranks that have ended the call leave the process group, unless all have ended it by then.

        Peers that wait for such a rank in a collective then get an error instead of waiting.
        """
        at = time.monotonic() + seconds
        self._leave_at = at if self._leave_at is None else min(self._leave_at, at)

    def _leave(self) -> None:
        self._leave_at = None
        if self.unsettled:
            for rank in self.outcomes.keys() - self._left:
                self.tree.send(rank, messages.LeaveGroup())
            self._left |= self.outcomes.keys()

    @property
    def broke_group(self) -> bool:
        """True if a failure has cost the ranks their process group."""
        return not self.kept_group and any(outcome.failed for outcome in self.outcomes.values())

    @property
    def kept_group(self) -> bool:
        """True if all ranks still have the process group with which the call began, and are in step in it."""
        states = [outcome.group for outcome in self.outcomes.values()]
        if self._left or any(state is None or not state.is_kept for state in states):
            return False
        raised = [outcome.raised.report for outcome in self.outcomes.values() if outcome.raised is not None]
        if not raised:
            return True
        num_calls: dict[str, set[int]] = {}
        for state in states:
            for name, number in (state.num_calls if state is not None else {}).items():
                num_calls.setdefault(name, set()).add(number)
        in_step = all(len(numbers) == 1 for numbers in num_calls.values())
        return in_step and not any(is_victim_like(report) for report in raised)

    def _send_signal(self) -> None:
        assert self.ladder is not None
        ranks, signum = self.unsettled, self.ladder.rung.signum
        if signum is None or not ranks:
            return
        if signum == signal.SIGTERM and self.tree.setup.many_calls:
            # The death of one rank releases all ranks that wait for it, and the others' memory is worth keeping.
            ranks, signum = ranks[:1], signal.SIGKILL
        if signum == signal.SIGKILL:
            alive = self.tree.pids
            self._doomed.update(rank for rank in ranks if rank in alive)
            if not alive:
                # No rank has been started yet: the fork server may still be importing torch.
                self.tree.kill_supervisor()
        self.tree.signal(ranks, signum)

    def pause(self, *, paused: bool) -> None:
        """Stop the clock of the time-out while a rank waits for the user's input, and start it again afterwards."""
        now, paused = time.monotonic(), paused or not (self.debugged is None and self.paused_after is None)
        if paused and self._paused_at is None:
            self._paused_at = now
        elif not paused and self._paused_at is not None:
            if self._deadline is not None:
                self._deadline += now - self._paused_at
            self._paused_at = None

    def next_deadline(self) -> float | None:
        """Return the time at which `act` has something to do; None if it has nothing to do."""
        moments: list[float | None] = [self._fail_at] if self.ladder is None else [self.ladder.deadline]
        if self.debugged is None:
            moments.append(self._leave_at)
        if self.ladder is None and self._paused_at is None:
            moments.append(self._deadline)
        known = [moment for moment in moments if moment is not None and math.isfinite(moment)]
        return min(known, default=None)

    def act(self, before_stop: Callable[[], Any]) -> None:
        """Do what is due; `before_stop` is called before the first signal of a stop that the user did not ask for."""
        now = time.monotonic()
        if self._leave_at is not None and now >= self._leave_at and (self.debugged is None or self.ladder is not None):
            self._leave()
        if self.ladder is not None:
            if now >= self.ladder.deadline:
                self.ladder.climb(now)
                self._send_signal()
        elif self._fail_at is not None and now >= self._fail_at:
            if all(_is_victim(outcome) for outcome in self._failed()):
                before_stop()
            self._climb_onto(Ladder.start(time.monotonic(), FAILURE_BUDGETS))
        elif self._deadline is not None and self._paused_at is None and now >= self._deadline:
            self.timed_out = True
            before_stop()
            self._climb_onto(Ladder.start(time.monotonic(), USER_BUDGETS))

    def _failed(self) -> list[RankOutcome]:
        return [outcome for outcome in self.outcomes.values() if outcome.failed]

    @property
    def rung(self) -> Rung | None:
        """The last rung that the stop needed; None if nothing was stopped."""
        if self.ladder is None:
            return None if self._asked_at is None else Rung.ASK
        return self.ladder.rung


def _is_victim(outcome: RankOutcome) -> bool:
    return outcome.raised is not None and is_victim_like(outcome.raised.report)
