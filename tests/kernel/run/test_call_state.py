"""The process group after a call whose outcomes are made up: kept, or lost to the ranks."""

from __future__ import annotations

import pytest

from notebook_launcher.kernel.run.call_state import CallState, RankOutcome
from notebook_launcher.messaging import messages
from tests.support import outcomes
from tests.support.outcomes import BOOM, LOST_PEER

KEPT = messages.GroupState(is_kept=True, num_calls={"all_reduce": 2})


def returned(rank: int, group: messages.GroupState = KEPT) -> RankOutcome:
    return outcomes.returned(rank, group)


def raised(rank: int, report: messages.ExceptionReport = BOOM, group: messages.GroupState = KEPT) -> RankOutcome:
    return outcomes.raised(rank, report, group=group)


def exited(rank: int) -> RankOutcome:
    record = messages.RankExited(rank=rank, pid=100, exitcode=-9, time=1.0, peak_rss=0, oom=False)
    return RankOutcome(rank, 1.0, exited=record)


def state_of(*known: RankOutcome) -> CallState:
    state = CallState(len(known), None)
    for outcome in known:
        state.replace(outcome)
    return state


ELSEWHERE = messages.GroupState(is_kept=True, num_calls={"all_reduce": 3})
DESTROYED = messages.GroupState(is_kept=False, num_calls={})


@pytest.mark.parametrize(
    ("known", "kept"),
    [
        ([returned(0), returned(1)], True),
        ([returned(0), raised(1)], True),
        ([raised(0), raised(1)], True),
        ([returned(0), returned(1, ELSEWHERE)], True),  # All returned, so what one rank did more did not need others.
        ([returned(0), raised(1, group=ELSEWHERE)], False),
        ([raised(0), raised(1, LOST_PEER)], False),
        ([returned(0), returned(1, DESTROYED)], False),
        ([returned(0), exited(1)], False),
        ([returned(0), RankOutcome(1, 1.0)], False),
    ],
)
def test_group_is_kept_by_ranks_that_are_alive_and_in_step(known: list[RankOutcome], *, kept: bool) -> None:
    state = state_of(*known)
    assert state.kept_group is kept
    assert state.broke_group is (not kept and bool(state.failures))


def test_group_is_lost_once_a_rank_was_asked_to_leave() -> None:
    state = state_of(returned(0), returned(1))
    assert state.leave_group() == {0, 1}
    assert not state.leave_group()  # Each rank is asked once.
    assert not state.kept_group
    assert not state.broke_group  # Nothing failed.
