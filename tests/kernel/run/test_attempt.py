"""One call on a process tree that is made up and a clock that stands still: when it is stopped, how, and its group."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from notebook_launcher import LaunchConfig
from notebook_launcher.engines.board import Board
from notebook_launcher.engines.engine import FromRank, RankLost
from notebook_launcher.kernel.plan import make_plan
from notebook_launcher.kernel.run.attempt import RETURN_GRACE, SESSION_GRACE, SURE_GRACE, VICTIM_GRACE, Attempt
from notebook_launcher.kernel.run.call_state import CallState, RankOutcome
from notebook_launcher.kernel.run.ladder import (
    AT_ONCE_BUDGET,
    FAILED_BUDGET,
    FAILURE_BUDGETS,
    LAST_BUDGET,
    STOP_BUDGET,
    USER_BUDGETS,
    Rung,
)
from notebook_launcher.messaging import board_layout, messages
from tests.support.outcomes import BOOM, LOST_PEER, raised, raised_record, returned, returned_record


class Tree:
    """A tree whose ranks do nothing; `log` is all that it was told, `sent` the records of each rank."""

    def __init__(self, num_processes: int = 3, *, many_calls: bool = False) -> None:
        plan = make_plan(LaunchConfig(num_processes=num_processes, devices="cpu"))
        self.setup = plan.setup(many_calls=many_calls)
        self.board = Board(bytearray(board_layout.BOARD_SIZE))
        self.pids = {rank: 100 + rank for rank in range(num_processes)}
        self.log: list[Any] = []
        self.sent: list[tuple[int, object]] = []

    def send(self, rank: int, record: object) -> None:
        self.sent.append((rank, record))

    def send_all(self, record: object, _fds: object = ()) -> None:
        self.sent += [(rank, record) for rank in self.pids]

    def signal(self, ranks: tuple[int, ...], signum: int) -> None:
        self.log.append((ranks, signum))

    def kill_supervisor(self) -> None:
        self.log.append("supervisor")


class Call:
    """An attempt that has begun, by a clock that is set by hand, and the moments at which it gathered stacks."""

    def __init__(
        self, tree: Tree | None = None, *, deadline: float | None = None, debug: bool = False, **options: Any
    ) -> None:
        self.now = 1000.0
        self.tree = tree or Tree()
        made: Any = self.tree
        ends = None if deadline is None else self.now + deadline
        call = messages.RunCall(call_id=1, generation=0)
        self.attempt = Attempt(made, call, (), deadline=ends, debug=debug, clock=lambda: self.now, **options)
        self.attempt.begin()
        self.tree.sent.clear()
        self.looked: list[float] = []

    def start(self) -> Call:
        for rank in self.tree.pids:
            self.attempt.fold(FromRank(rank, messages.CallStarted(call_id=1), []))
        return self

    def give_value(self, rank: int, call_id: int = 1) -> None:
        self.attempt.fold(FromRank(rank, returned_record(self.now, call_id=call_id), []))

    def fail(self, rank: int, report: messages.ExceptionReport = BOOM) -> None:
        self.attempt.fold(FromRank(rank, raised_record(report, self.now), []))

    def lose(self, rank: int) -> None:
        exited = messages.RankExited(
            rank=rank, pid=self.tree.pids.pop(rank), exitcode=-9, time=self.now, peak_rss=0, oom=False
        )
        self.attempt.fold(RankLost(exited))

    def act(self, seconds: float = 0.0) -> list[Any]:
        """Let time pass, let the attempt act, and return the signals that it sends."""
        self.now += seconds
        self.attempt.act(lambda: self.looked.append(self.now))
        told, self.tree.log = self.tree.log, []
        return told

    def asked_to_leave(self) -> list[int]:
        return [rank for rank, record in self.tree.sent if isinstance(record, messages.LeaveGroup)]


# A failure.


def test_attempt_without_failures_settles_once_every_rank_has_returned() -> None:
    call = Call().start()
    assert call.attempt.next_deadline() is None
    for rank in (0, 1):
        call.give_value(rank)
    assert not call.attempt.settled
    assert call.attempt.state.running == {2}
    call.give_value(2, call_id=7)  # Of another call.
    assert not call.attempt.settled
    call.give_value(2)
    assert (call.attempt.settled, call.attempt.is_ending, call.attempt.rung) == (True, False, None)
    call.act(RETURN_GRACE)
    assert call.asked_to_leave() == []  # Nobody leaves the group once every rank has settled.
    assert call.attempt.state.kept_group


@pytest.mark.parametrize(("report", "grace"), [(BOOM, SURE_GRACE), (LOST_PEER, VICTIM_GRACE)])
def test_failure_stops_the_others_after_a_grace_and_climbs_the_ladder(
    report: messages.ExceptionReport, grace: float
) -> None:
    call = Call().start()
    call.fail(1, report)
    assert call.attempt.is_ending
    assert call.attempt.next_deadline() == call.now + grace
    assert call.act(grace - 0.01) == []
    assert call.act(0.01) == [((0, 2), signal.SIGINT)]
    assert bool(call.looked) == (report is LOST_PEER)  # Stacks are of use where no rank is to blame yet.
    assert call.act() == []
    assert call.asked_to_leave() == [1]
    assert call.attempt.next_deadline() == call.now + FAILURE_BUDGETS[Rung.INTERRUPT]
    call.fail(0)
    assert call.act(FAILURE_BUDGETS[Rung.INTERRUPT]) == [((2,), signal.SIGTERM)]
    assert call.act(FAILURE_BUDGETS[Rung.TERMINATE]) == [((2,), signal.SIGKILL)]
    assert call.act(FAILED_BUDGET / 2) == []
    call.lose(2)
    assert (call.attempt.settled, call.attempt.rung) == (True, Rung.KILL)
    assert [call.attempt.state.outcomes[rank].after_stop for rank in range(3)] == [True, False, True]


def test_a_sure_failure_shortens_the_grace_of_a_likely_consequence() -> None:
    call = Call().start()
    call.fail(1, LOST_PEER)
    call.now += 0.1
    call.fail(0)
    assert call.attempt.next_deadline() == call.now + SURE_GRACE
    assert call.act(SURE_GRACE) == [((2,), signal.SIGINT)]
    assert call.looked == []


# A stop.


def test_stop_interrupts_ranks_that_read_no_board_and_asks_others_first() -> None:
    call = Call().start()
    call.attempt.stop()
    assert call.act() == [((0, 1, 2), signal.SIGINT)]
    asked = Call().start()
    asked.tree.board.memory[board_layout.COOPERATIVE + 1] = 1
    asked.attempt.stop()
    assert asked.act() == []
    assert asked.tree.board.memory[board_layout.STOP_FLAG] == board_layout.STOP_EACH
    assert asked.attempt.rung is Rung.ASK
    assert asked.act(USER_BUDGETS[Rung.ASK]) == [((0, 1, 2), signal.SIGINT)]
    assert asked.act(USER_BUDGETS[Rung.INTERRUPT]) == [((0, 1, 2), signal.SIGTERM)]
    assert asked.act(USER_BUDGETS[Rung.TERMINATE]) == [((0, 1, 2), signal.SIGKILL)]


def test_stop_at_once_kills_and_a_rank_that_was_killed_settles_when_it_exits() -> None:
    call = Call().start()
    call.attempt.stop(at_once=True)
    assert call.act() == [((0, 1, 2), signal.SIGKILL)]
    for rank in range(3):
        call.give_value(rank)
    assert not call.attempt.settled
    for rank in range(3):
        call.lose(rank)
    assert call.attempt.settled


@pytest.mark.parametrize("case", ["limit", "stop", "kill", "failure", "failure before the limit"])
def test_ranks_that_do_not_end_are_given_up(case: str) -> None:
    deadline = {"limit": 10.0, "failure before the limit": 11.0}.get(case, 1000.0)
    call = Call(deadline=deadline).start()
    call.now += 10.0
    if case.startswith("failure"):
        call.fail(1)
        call.now += SURE_GRACE
    elif case != "limit":
        call.attempt.stop()
    call.act()
    if case == "kill":
        call.act(1.0)
        call.attempt.stop(at_once=True)
        assert ((0, 1, 2), signal.SIGKILL) in call.act(0.5)
        call.attempt.stop(at_once=True)  # A third request changes nothing.
    given_up = {
        "kill": 11.0 + AT_ONCE_BUDGET, "failure": 10.0 + SURE_GRACE + FAILED_BUDGET,
        "failure before the limit": 11.0 + STOP_BUDGET,
    }.get(case, 10.0 + STOP_BUDGET)  # fmt: skip
    began = call.now
    while "supervisor" not in call.act():
        moment = call.attempt.next_deadline()
        assert moment is not None
        call.now = moment
    assert call.now - began < given_up
    assert call.now == pytest.approx(1000.0 + given_up)
    assert not call.attempt.settled
    assert call.act(LAST_BUDGET) == []
    assert call.attempt.settled
    assert call.attempt.state.failed
    assert call.attempt.timed_out == (case == "limit")


def test_rank_of_a_session_that_is_in_c_code_when_its_peer_fails_has_a_second_to_come_back() -> None:
    call = Call(Tree(many_calls=True)).start()
    call.fail(1)
    assert call.act(SURE_GRACE) == [((0, 2), signal.SIGINT)]
    assert call.act(1.2) == []
    assert call.act(0.2) == [((0,), signal.SIGKILL)]


def test_stop_after_the_step_sends_no_signal() -> None:
    call = Call().start()
    assert not call.attempt.requests.ask_to_stop(call.attempt.state.unsettled)
    call.tree.board.memory[board_layout.COOPERATIVE] = 1
    assert call.attempt.requests.ask_to_stop(call.attempt.state.unsettled)
    assert call.tree.board.memory[board_layout.STOP_FLAG] == board_layout.STOP_TOGETHER
    assert (call.act(1000), call.attempt.rung) == ([], Rung.ASK)
    call.fail(0)
    assert call.attempt.state.outcomes[0].after_stop
    assert call.act(1000) == []


# Ranks that leave the process group.


def test_stop_of_a_session_has_ranks_leave_the_group_and_kills_one_in_place_of_terminating_all() -> None:
    call = Call(Tree(many_calls=True)).start()
    call.give_value(1)
    assert call.attempt.next_deadline() is None
    call.attempt.stop()
    assert call.act(SESSION_GRACE) == [((0, 2), signal.SIGINT)]
    assert call.tree.sent == [(1, messages.LeaveGroup())]
    assert call.act(USER_BUDGETS[Rung.INTERRUPT]) == [((0,), signal.SIGKILL)]


# The debugger.


def test_debugger_holds_the_other_ranks_and_the_clock_until_it_is_left() -> None:
    call = Call(debug=True, deadline=10.0).start()
    call.fail(1, LOST_PEER)
    call.fail(2)
    assert call.attempt.failure_to_debug() is None
    assert call.act(SURE_GRACE) == []
    failure = call.attempt.failure_to_debug()
    assert failure is not None
    assert failure.rank == 2
    assert call.attempt.failure_to_debug() is None
    call.attempt.begin_debugging(2)
    assert call.tree.sent[-1] == (2, messages.DebugFailure())
    assert call.act(1000) == []
    assert (call.attempt.is_ending, call.attempt.settled, call.attempt.next_deadline()) == (True, False, None)
    call.attempt.end_debugging(0)  # Of another rank.
    assert call.act() == []
    call.attempt.end_debugging(2)
    assert call.act() == [((0,), signal.SIGINT)]
    assert not call.attempt.timed_out


# The time limits.


def test_run_that_takes_too_long_is_stopped_and_looked_at_first() -> None:
    call = Call(deadline=10.0).start()
    assert call.attempt.next_deadline() == call.now + 10
    assert call.act(9.9) == []
    assert call.act(0.1) == [((0, 1, 2), signal.SIGINT)]
    assert (call.looked, call.attempt.timed_out, call.attempt.went_idle) == ([call.now], True, False)
    assert call.attempt.next_deadline() == call.now + USER_BUDGETS[Rung.INTERRUPT]


def test_clock_of_the_time_limit_stands_still_while_input_or_a_pause_holds_the_ranks() -> None:
    call = Call(deadline=10.0).start()
    call.attempt.hold_clock()
    call.now += 100
    assert call.attempt.next_deadline() is None
    call.attempt.note_change(messages.Changed(time=call.now, update=3, action="pause", values={}))
    call.attempt.release_clock()  # The input is answered, and the pause goes on.
    assert call.act(100) == []
    call.attempt.note_change(messages.Changed(time=call.now, update=3, action="resume", values={}))
    assert call.attempt.next_deadline() == call.now + 10
    assert call.act(10) == [((0, 1, 2), signal.SIGINT)]


def test_run_goes_idle_only_once_a_rank_runs_the_function() -> None:
    call = Call(idle_timeout=5.0)
    assert (call.act(1000), call.attempt.next_deadline()) == ([], None)
    call.start()
    assert call.act(4.9) == []
    call.attempt.note_activity()
    assert call.act(4.9) == []
    assert call.act(0.1) == [((0, 1, 2), signal.SIGINT)]
    assert (call.attempt.timed_out, call.attempt.went_idle) == (True, True)


# Changes.


def test_changes_reach_all_ranks_before_the_board_announces_them() -> None:
    call = Call(Tree(2)).start()
    requests, memory = call.attempt.requests, call.tree.board.memory
    assert not requests.ask_to_change("pause")
    memory[board_layout.HAS_SAFEPOINT] = 1
    assert requests.ask_to_change("set", {"lr": 0.1})
    assert call.tree.sent == [(rank, messages.Change(number=1, action="set", values={"lr": 0.1})) for rank in range(2)]
    assert memory[board_layout.CHANGES_ASKED] == 1
    assert requests.ask_to_save()
    assert memory[board_layout.SAVES_ASKED] == 1
    call.attempt.note_change(messages.Changed(time=call.now, update=3, action="pause", values={}))
    assert requests.ask_to_save()  # Paused ranks read their channels, not the board.
    assert (memory[board_layout.SAVES_ASKED], memory[board_layout.CHANGES_ASKED]) == (1, 2)


def exited(rank: int) -> RankOutcome:
    record = messages.RankExited(rank=rank, pid=100, exitcode=-9, time=1.0, peak_rss=0, oom=False)
    return RankOutcome(rank, 1.0, exited=record)


TWICE, THRICE = (messages.GroupState(is_kept=True, num_calls={"all_reduce": number}) for number in (2, 3))
DESTROYED = messages.GroupState(is_kept=False, num_calls={})


@pytest.mark.parametrize(
    ("known", "kept"),
    [
        ([returned(0), returned(1)], True),
        ([returned(0, TWICE), raised(1, group=TWICE)], True),
        ([raised(0), raised(1)], True),
        ([returned(0, TWICE), returned(1, THRICE)], True),  # All returned, so what one did more did not need others.
        ([returned(0, TWICE), raised(1, group=THRICE)], False),
        ([raised(0), raised(1, LOST_PEER)], False),
        ([returned(0), returned(1, DESTROYED)], False),
        ([returned(0), exited(1)], False),
        ([returned(0), RankOutcome(1, 1.0)], False),
    ],
)
def test_group_is_kept_by_ranks_that_are_alive_and_in_step(known: list[RankOutcome], *, kept: bool) -> None:
    state = CallState(len(known), None)
    for outcome in known:
        state.replace(outcome)
    assert state.kept_group is kept
    assert state.broke_group is (not kept and bool(state.failures))
    # It is lost once a rank was asked to leave, each once.
    assert state.leave_group() == {0, 1}
    assert not state.leave_group()
    assert not state.kept_group
    assert state.broke_group is bool(state.failures)
