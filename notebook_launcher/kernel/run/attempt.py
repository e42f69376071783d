"""One call on one process tree, from the moment it is sent until every rank has settled.

`Attempt` folds events into the state of the call and decides two things: when a failure or a request to stop ends the
call on all ranks, and which rung of the ladder is needed for that.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.engine import FromRank, NodeLost, Output, RankLost, SupervisorLost
from notebook_launcher.kernel.failures.culprit import is_victim
from notebook_launcher.kernel.run import ladder
from notebook_launcher.kernel.run.call_state import CallState, RankOutcome
from notebook_launcher.kernel.run.commands import RankRequests
from notebook_launcher.kernel.run.ladder import Ladder, Rung
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.engines.engine import Event, Tree

SURE_GRACE = 0.15
"""Longest wait in seconds for the failures of other ranks, if the first failure is surely a cause."""
SESSION_GRACE = 0.15
"""Longest wait in seconds until all ranks of a session have ended a call that is being stopped. Then ranks that have
ended the call leave the process group, which breaks the group; models that are wrapped with it are worth keeping."""
RETURN_GRACE = 1.0
"""Seconds after which a rank that has returned leaves the process group while others have not returned. Under torchrun
the rank's process would have exited, and peers that wait for it in a collective would get an error."""
NO_ANSWER = "it did not end its ranks, and did not end itself"
VICTIM_GRACE = 1.0
"""Longest wait in seconds for the failures of other ranks, if the first failure looks like a consequence of another
one (for example "connection reset")."""


class Attempt:
    """One try at a call: knows each rank's outcome, and decides when and how the call is stopped.

    Used in the run's thread alone; other threads may read its public attributes. `fds` are the descriptors beside the
    record of the call. `deadline`: time at which the run is stopped. `idle_timeout` and `debug` as in `LaunchConfig`.
    """

    def __init__(
        self,
        tree: Tree,
        call: messages.RunCall,
        fds: Sequence[int],
        *,
        deadline: float | None,
        idle_timeout: float | None = None,
        debug: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tree = tree
        self.state = CallState(tree.setup.num_processes, call.ranks)
        self.requests = RankRequests(tree, clock)
        """Requests that the ranks carry out at their next step."""
        self.ladder: Ladder | None = None
        """The present stop; None while no stop is under way."""
        self.timed_out = False
        """True if the run exceeded `LaunchConfig.timeout` or `idle_timeout`."""
        self.gave_up = False
        """True once the supervisors were killed, because the ranks had not ended in time."""
        self.gives_up_at = math.inf
        """Time at which what has not ended of the ranks, and then of their supervisors, is given up."""
        self.went_idle = False
        """True if the run exceeded `LaunchConfig.idle_timeout`."""
        self.limit = math.inf if deadline is None else deadline
        """Time at which the run has taken too long; infinity: never."""
        self._idle_timeout = math.inf if idle_timeout is None else idle_timeout
        self._active_at = clock()
        """Time at which a rank last sent something."""
        self._held_at: float | None = None
        """Time since which the clock of the time limit stands still; None while it runs."""
        self._clock = clock
        self._call = call
        self._fds = fds
        self._fail_at: float | None = None
        """Time at which the other ranks are stopped, because a rank has failed."""
        self._leave_at: float | None = None
        """Time at which ranks that have ended the call leave the process group."""
        self._may_debug = debug
        """True until the first failure has been looked into."""
        self._stop_grace = SESSION_GRACE if tree.setup.many_calls else 0.0

    def begin(self) -> None:
        """Send the call; a rank that is not up yet finds the call in its channel."""
        self.tree.board.clear()
        self.tree.send_all(self._call, self._fds)

    def forget_outcomes(self, generation: int) -> None:
        """Forget ranks that ended before the call began and have been replaced since."""
        self.state.outcomes.clear()
        self._fail_at = self._leave_at = None
        self._call = dataclasses.replace(self._call, generation=generation)

    @property
    def call_id(self) -> int:
        """The number of the call."""
        return self._call.call_id

    @property
    def settled(self) -> bool:
        """True once every rank has settled, or the tree is lost."""
        return (self.state.all_settled and not self._is_to_debug) or self.state.tree_lost

    @property
    def is_ending(self) -> bool:
        """True while the ranks are being stopped, or are about to be because a rank has failed."""
        return self.ladder is not None or self._fail_at is not None or self.state.debugged is not None

    @property
    def _is_to_debug(self) -> bool:
        """True if a failure waits to be looked into."""
        return self._may_debug and self.ladder is None and self._fail_at is not None

    def failure_to_debug(self) -> RankOutcome | None:
        """Return the failure to debug: once, when the grace period is over; None before and afterwards."""
        if not self._is_to_debug or (self._fail_at or 0.0) > self._clock():
            return None
        self._may_debug = False
        return min(self.state.failures, key=lambda outcome: (_is_victim(outcome), outcome.time))

    def begin_debugging(self, rank: int) -> None:
        """Open the debugger in a rank that has failed; the others stay as they are, and clocks stop, until its end."""
        self.state.debugged = rank
        self._fail_at = None
        self.hold_clock()
        self.tree.send(rank, messages.DebugFailure())

    def end_debugging(self, rank: int) -> None:
        """Continue with the usual end of a failed run, if this is the rank that was debugged."""
        if rank != self.state.debugged:
            return
        self.state.debugged = None
        self.release_clock()
        self._fail_at = self._clock()

    def fold(self, event: Event) -> None:
        """Record an event of the process tree."""
        if isinstance(event, FromRank | Output):
            self.note_activity()
        match event:
            case FromRank(rank, messages.CallStarted() as record, _) if record.call_id == self._call.call_id:
                self.state.started.add(rank)
            case FromRank(rank, messages.Returned() | messages.Raised() as record, fds) if (
                record.call_id == self._call.call_id
            ):
                self._note_outcome(RankOutcome.of_record(rank, record, fds))
            case RankLost(exited):
                if not self.state.note_exit(exited):
                    self._note_outcome(RankOutcome(rank=exited.rank, time=exited.time, exited=exited))
            case messages.RankNotStarted():
                self.state.note_not_started(event)
                self._note_outcome(RankOutcome(rank=event.rank, time=self._clock()))
            case SupervisorLost() | NodeLost():
                self.state.note_loss(event)
            case FromRank():
                event.close()  # No outcome has taken its descriptors.

    def note_activity(self) -> None:
        """Record that a rank sent something just now."""
        self._active_at = self._clock()

    def _note_outcome(self, outcome: RankOutcome) -> None:
        stopping = self._stopping_since
        outcome.after_stop = stopping is not None and outcome.time >= stopping
        outcome.pid = self.tree.pids.get(outcome.rank) if outcome.exited is None else outcome.exited.pid
        self.state.replace(outcome)
        if stopping is not None:
            self._leave_at = self._earlier(self._leave_at, self._stop_grace)
        elif outcome.failed:
            self._fail_at = self._earlier(self._fail_at, VICTIM_GRACE if _is_victim(outcome) else SURE_GRACE)
        elif not (self.tree.setup.many_calls or "nccl" in (self.tree.setup.backend or "")):
            # Not with NCCL: collectives that the rank has begun may still be running on its GPU.
            self._leave_at = self._earlier(self._leave_at, RETURN_GRACE)

    @property
    def _stopping_since(self) -> float | None:
        """Time since which the ranks are asked to stop, or are made to; None if nobody stops them."""
        asked_at = self.requests.stop_asked_at
        return self.ladder.started if asked_at is None and self.ladder is not None else asked_at

    def stop(self, *, at_once: bool = False, asked_at: float | None = None) -> None:
        """Begin to stop, as was asked for at a time (None: now); with `at_once` go to the last rung."""
        now = self._clock()
        if self.ladder is None:
            self.tree.board.ask_to_stop(together=False)
            can_ask = self.requests.stop_asked_at is None and self.requests.can_ask(self.state.unsettled)
            first = Rung.KILL if at_once else Rung.ASK if can_ask else Rung.INTERRUPT
            self._climb_onto(Ladder(now, ladder.USER_BUDGETS, first))
        elif at_once:
            self.ladder.climb_to(Rung.KILL, now)
            self._send_signal()
        self._give_up_by(
            (now if asked_at is None else asked_at) + (ladder.AT_ONCE_BUDGET if at_once else ladder.STOP_BUDGET)
        )

    def note_change(self, changed: messages.Changed) -> None:
        """Stop the clocks while the ranks are paused."""
        if not self.requests.note_change(changed):
            return
        if self.requests.paused_after is None:
            self.release_clock()
        else:
            self.hold_clock()

    def _give_up_by(self, moment: float) -> None:
        """Give up ranks that have not ended at this time, if no earlier one is set."""
        if not self.gave_up:
            self.gives_up_at = min(self.gives_up_at, moment)

    def _climb_onto(self, stop: Ladder) -> None:
        self.ladder = stop
        if self.state.outcomes:
            self._leave_at = self._earlier(self._leave_at, self._stop_grace)
        self._send_signal()

    def _earlier(self, known: float | None, seconds: float) -> float:
        """Return the time in so many seconds, or the known one if it is earlier."""
        at = self._clock() + seconds
        return at if known is None else min(known, at)

    def _send_signal(self) -> None:
        assert self.ladder is not None
        ranks, signum = self.state.unsettled, self.ladder.rung.signum
        if signum is None or not ranks:
            return
        if signum == signal.SIGTERM and self.tree.setup.many_calls:
            # The death of one rank releases all ranks that wait for it, and the others' memory is worth keeping.
            ranks, signum = ranks[:1], signal.SIGKILL
        if signum == signal.SIGKILL:
            alive = self.tree.pids
            self.state.doomed.update(rank for rank in ranks if rank in alive)
            if not alive:
                # No rank has been started yet: the fork server may still be importing torch.
                self.tree.kill_supervisor()
        self.tree.signal(ranks, signum)

    def hold_clock(self) -> None:
        """Stop the clock of the time limit until `release_clock`; idempotent."""
        if self._held_at is None:
            self._held_at = self._clock()

    def release_clock(self) -> None:
        """Let the clock of the time limit run on, unless a debugger or a pause still holds all ranks; idempotent."""
        if self._held_at is not None and self.state.debugged is None and self.requests.paused_after is None:
            self.limit += self._clock() - self._held_at
            self._held_at = None

    @property
    def _idle_at(self) -> float:
        """Time at which the run counts as idle: not before a rank runs the function, since the start may take long."""
        return self._active_at + self._idle_timeout if self.state.started else math.inf

    @property
    def _next_limit(self) -> float:
        return min(self._idle_at, self.limit if self._held_at is None else math.inf)

    def next_deadline(self) -> float | None:
        """Return the time at which `act` has something to do; None if it has nothing to do."""
        moments: list[float | None] = [self.gives_up_at]
        moments.append(self._fail_at if self.ladder is None else self.ladder.deadline)
        if self.state.debugged is None:
            moments.append(self._leave_at)
        if self.ladder is None:
            moments.append(self._next_limit)
        known = [moment for moment in moments if moment is not None and math.isfinite(moment)]
        return min(known, default=None)

    def act(self, before_stop: Callable[[], Any]) -> None:
        """Do what is due; `before_stop` is called before the first signal of a stop that the user did not ask for."""
        now = self._clock()
        self._leave_if_due(now)
        self._give_up_if_due(now)
        if self.ladder is not None:
            if now >= self.ladder.deadline:
                self.ladder.climb(now)
                self._send_signal()
        elif not self._stop_if_failed(now, before_stop):
            self._stop_if_over_limit(now, before_stop)

    def _leave_if_due(self, now: float) -> None:
        is_debugging = self.state.debugged is not None and self.ladder is None
        if self._leave_at is None or now < self._leave_at or is_debugging:
            return
        self._leave_at = None
        if self.state.unsettled:
            for rank in self.state.leave_group():
                self.tree.send(rank, messages.LeaveGroup())

    def _give_up_if_due(self, now: float) -> None:
        """End the run with what is known, if its ranks have not ended by now."""
        if now < self.gives_up_at:
            return
        if self.gave_up:
            self.state.note_loss(SupervisorLost(NO_ANSWER))
        else:
            self.gave_up = True
            self.gives_up_at = now + ladder.LAST_BUDGET
            self.tree.kill_supervisor()

    def _stop_if_failed(self, now: float, before_stop: Callable[[], Any]) -> bool:
        """Stop the ranks once the grace period of a failure is over; return True if that is done here."""
        if self._fail_at is None or now < self._fail_at or self._may_debug:
            return False
        if all(_is_victim(outcome) for outcome in self.state.failures):
            before_stop()
        is_session = self.tree.setup.many_calls
        budgets = ladder.SESSION_FAILURE_BUDGETS if is_session else ladder.FAILURE_BUDGETS
        self._climb_onto(Ladder(self._clock(), budgets))
        self._give_up_by(min(now + ladder.FAILED_BUDGET, max(now, self.limit) + ladder.STOP_BUDGET))
        return True

    def _stop_if_over_limit(self, now: float, before_stop: Callable[[], Any]) -> None:
        if now < self._next_limit:
            return
        self.timed_out, self.went_idle = True, now >= self._idle_at
        before_stop()
        self._climb_onto(Ladder(self._clock(), ladder.USER_BUDGETS))
        self._give_up_by(now + ladder.STOP_BUDGET)

    @property
    def rung(self) -> Rung | None:
        """The last rung that the stop needed; None if nothing was stopped."""
        if self.ladder is None:
            return None if self.requests.stop_asked_at is None else Rung.ASK
        return self.ladder.rung


def _is_victim(outcome: RankOutcome) -> bool:
    return outcome.raised is not None and is_victim(outcome.raised.report)
