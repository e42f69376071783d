"""One call on one process tree, from the moment it is sent until every rank has settled.

A rank has settled when it waits for the next call or its process is gone. The loop below takes events,
folds them into what is known of each rank, and decides three things: when a failure or a request to
stop ends the call for everybody, how far up the ladder that must go, and when all have settled.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher import context, messages
from notebook_launcher.engines.events import FromRank, Output, RankLost, SupervisorLost, Woken
from notebook_launcher.kernel.culprit import is_victim_like
from notebook_launcher.kernel.ladder import FAILURE_BUDGETS, USER_BUDGETS, Ladder, Rung
from notebook_launcher.kernel.rank_outcome import RankOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.engines.events import Event
    from notebook_launcher.engines.process_tree import ProcessTree

__all__ = ["Attempt"]

SURE_GRACE = 0.15
"""Seconds that other ranks get to report their own failure after one that is surely a cause."""
SESSION_GRACE = 0.15
"""Seconds that the ranks of a session get to end a call that is being stopped, before those that have ended leave
the process group and so break it: models wrapped with it are worth keeping."""
RETURN_GRACE = 1.0
"""Seconds after which a rank that has returned leaves the process group while others have not. Under torchrun its
process has ended by then, and whoever waits for it in a collective gets an error."""
VICTIM_GRACE = 1.0
"""The same after one that looks like a consequence ("connection reset"): the cause may still arrive."""


class Attempt:
    """The brain of a call; runs in the run's thread."""

    def __init__(
        self, tree: ProcessTree, call: messages.RunCall, parcel_fd: int | None, *, deadline: float | None
    ) -> None:
        self.tree = tree
        self.outcomes: dict[int, RankOutcome] = {}
        self.started: set[int] = set()
        self.ladder: Ladder | None = None
        self.timed_out = False
        self.supervisor_lost: str | None = None
        self.not_started: messages.RankNotStarted | None = None
        self._call = call
        self._parcel_fd = parcel_fd
        self._deadline = deadline
        self._paused_at: float | None = None
        self._fail_at: float | None = None
        self._asked_at: float | None = None
        self._leave_at: float | None = None
        self._left: set[int] = set()
        self._stop_grace = SESSION_GRACE if tree.setup.many_calls else 0.0
        self._num_processes = tree.setup.num_processes
        self._doomed: set[int] = set()

    def begin(self) -> None:
        """Send the call; ranks that are not up yet find it waiting."""
        self.tree.board[:] = bytes(context.BOARD_SIZE)
        for rank in range(self._num_processes):
            self.tree.send(rank, self._call, [] if self._parcel_fd is None else [self._parcel_fd])

    def forget_outcomes(self, generation: int) -> None:
        """Forget ranks that had ended before the call began and have been replaced since."""
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
        """Whether every rank has."""
        return not self.unsettled or self.supervisor_lost is not None

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The ranks that have not."""
        return tuple(rank for rank in range(self._num_processes) if not self._has_settled(rank))

    @property
    def is_ending(self) -> bool:
        """Whether the ranks are being stopped, or soon will be because one has failed."""
        return self.ladder is not None or self._fail_at is not None

    @property
    def running(self) -> frozenset[int]:
        """The ranks that are inside the function."""
        return frozenset(self.started - self.outcomes.keys())

    @property
    def absent(self) -> dict[int, str]:
        """The ranks that are not, each with what it has done: `returned`."""
        outcomes = {rank: "ended" if outcome.failed else "returned" for rank, outcome in self.outcomes.items()}
        late = set(range(self._num_processes)) - self.started - self.outcomes.keys()
        return dict.fromkeys(sorted(late), "not started the function yet") | outcomes

    def _has_settled(self, rank: int) -> bool:
        # One that was sent SIGKILL has not before it is gone, whatever it managed to say.
        return rank in self.outcomes and (rank not in self._doomed or self.outcomes[rank].exited is not None)

    def fold(self, event: Event) -> None:
        """Take in what happened."""
        match event:
            case FromRank(rank, messages.CallStarted() as record, _) if record.call_id == self._call.call_id:
                self.started.add(rank)
            case FromRank(rank, messages.Returned() as record, fds) if record.call_id == self._call.call_id:
                self._note_outcome(RankOutcome(rank=rank, time=record.time, returned=record, parcel_fd=fds[0]))
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
            # Not with NCCL: what the rank has begun may still be running on its GPU.
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
        else:
            known.exited, known.pid = exited, exited.pid

    def stop(self, *, at_once: bool = False) -> None:
        """Begin to stop, or go to the last rung."""
        now = time.monotonic()
        if self.ladder is None:
            self.tree.board[context.STOP_FLAG] = context.STOP_EACH
            self._climb_onto(Ladder.start(now, USER_BUDGETS, can_ask=self._asked_at is None and self._can_ask()))
        if at_once:
            self.ladder.climb(now, to_top=True)  # type: ignore[union-attr]
            self._send_signal()

    def ask_to_stop(self) -> bool:
        """Ask the ranks to stop after the step they are in, however long it is; return whether one looks."""
        if not self._can_ask():
            return False
        if self._asked_at is None:  # The first time counts, and before a rank can see the flag and end because of it.
            self._asked_at = time.monotonic()
        self.tree.board[context.STOP_FLAG] = context.STOP_TOGETHER
        return True

    def ask_to_save(self) -> bool:
        """Ask the ranks for a checkpoint; return whether one answers to that."""
        board = self.tree.board
        board[context.SAVES_ASKED] = (board[context.SAVES_ASKED] + 1) % 256
        return self.can_save

    @property
    def can_save(self) -> bool:
        """Whether an Accelerator answers to `ask_to_save`."""
        return bool(self.tree.board[context.HAS_SAFEPOINT])

    def activity_of(self, rank: int) -> int:
        """Return what a rank says that it does: COMPUTING, WAITING or SAVING."""
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
        """Have the ranks that have ended leave the process group, if others have not by then.

        Peers that wait for one of them in a collective get an error instead of waiting.
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
        """Whether a process group that the function has not given up itself is lost."""
        return not self.kept_group and any(outcome.failed for outcome in self.outcomes.values())

    @property
    def kept_group(self) -> bool:
        """Whether all ranks still have the process group with which the call began, and are in step in it."""
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
            # Ranks that wait for each other are all released by the death of one, and the others' memory
            # is worth keeping.
            ranks, signum = ranks[:1], signal.SIGKILL
        if signum == signal.SIGKILL:
            alive = self.tree.pids
            self._doomed.update(rank for rank in ranks if rank in alive)
            if not alive:
                # Nobody has been born yet: the fork server may still be importing torch.
                self.tree.kill_supervisor()
        self.tree.signal(ranks, signum)

    def pause(self, *, paused: bool) -> None:
        """Stop the clock of the time-out while a rank waits for the user's input."""
        now = time.monotonic()
        if paused and self._paused_at is None:
            self._paused_at = now
        elif not paused and self._paused_at is not None:
            if self._deadline is not None:
                self._deadline += now - self._paused_at
            self._paused_at = None

    def next_deadline(self) -> float | None:
        """Return the moment at which `act` has something to do."""
        moments: list[float | None] = [self._fail_at] if self.ladder is None else [self.ladder.deadline]
        moments.append(self._leave_at)
        if self.ladder is None and self._paused_at is None:
            moments.append(self._deadline)
        known = [moment for moment in moments if moment is not None and math.isfinite(moment)]
        return min(known, default=None)

    def act(self, before_stop: Callable[[], Any]) -> None:
        """Do what is due; `before_stop` is called before the first signal of a stop that nobody asked for."""
        now = time.monotonic()
        if self._leave_at is not None and now >= self._leave_at:
            self._leave()
        if self.ladder is not None:
            if now >= self.ladder.deadline:
                self.ladder.climb(now)
                self._send_signal()
        elif self._fail_at is not None and now >= self._fail_at:
            if all(outcome.raised is not None and is_victim_like(outcome.raised.report) for outcome in self._failed()):
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
        """How far the stop had to go; None if nothing was stopped."""
        if self.ladder is None:
            return None if self._asked_at is None else Rung.ASK
        return self.ladder.rung
