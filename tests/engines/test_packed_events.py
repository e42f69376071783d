"""Events of nodes on their way to the kernel: packed, held for a moment, taken some at a time."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_launcher import Commands, Session
from notebook_launcher.engines.cluster.clocks import in_time_of_kernel
from notebook_launcher.engines.cluster.packed_events import MAX_HOLD, MIN_HOLD, HeldEvents, pack_event, unpack_event
from notebook_launcher.engines.events import FromRank, Output, RankLost, Woken
from notebook_launcher.messaging import messages
from tests.support.run_state import tree_of

METRICS = messages.Metrics(time=5.0, step=3, values={"loss": 0.5})
PROGRESS = messages.Progress(time=5.0, done=1, total=None, description="train", loops=1, items=1)
PHASES = messages.Phases(
    time=5.0, windows=1, micro_batches=2, samples=8.0, fullest=(2, 8.0), num_fullest=1, seconds={"sync": 0.1},
    counts={"sync": 1}, spans=(("sync", 4.0, 0.1),), settings={"lr": 0.1}, since=3.0,
)  # fmt: skip
STARTED = FromRank(2, messages.CallStarted(call_id=1), [])
EXITED = RankLost(messages.RankExited(rank=2, pid=1, exitcode=0, time=5.0, peak_rss=0, oom=False))


@pytest.mark.parametrize(
    "event", [FromRank(2, METRICS, []), FromRank(2, PROGRESS, []), FromRank(2, PHASES, []), Output(2, "stderr", b"x")]
)
def test_event_that_comes_often_travels_as_a_tuple(event: FromRank | Output) -> None:
    packed = pack_event(event)
    assert isinstance(packed, tuple)
    assert unpack_event(packed, 0.0) == event


def test_times_are_shifted_to_the_clock_of_the_kernel() -> None:
    shifted: Any = unpack_event(pack_event(FromRank(2, PHASES, [])), 100.0)
    assert shifted.record.time == 105.0
    assert shifted.record.since == 103.0
    assert shifted.record.spans == (("sync", 104.0, 0.1),)
    assert in_time_of_kernel(PHASES, 100.0) == shifted.record


def test_calm_events_wait_for_others_and_urgent_ones_take_them_along() -> None:
    held = HeldEvents()
    held.add([Woken()], 0.0)
    assert held.next_due(10.0) == float("inf")
    held.add([FromRank(2, METRICS, [])], 10.0)
    held.add([Output(2, "stdout", b"x")], 10.0 + MIN_HOLD / 2)
    assert held.next_due(10.0) == pytest.approx(MIN_HOLD)
    assert held.next_due(10.0 + MIN_HOLD) == 0
    held.add([EXITED], 10.0)
    assert held.next_due(10.0) == 0
    taken = held.take()
    assert [type(event) for event in taken] == [tuple, tuple, RankLost]
    assert held.take() == ()


@pytest.mark.parametrize("event", [STARTED, messages.RankStarted(rank=2, pid=1)])
def test_start_of_a_rank_and_of_its_call_are_calm(event: Any) -> None:
    held = HeldEvents()
    held.add([event], 10.0)
    assert held.next_due(10.0) == pytest.approx(MIN_HOLD)


@pytest.mark.parametrize(("num_nodes", "hold"), [(2, MIN_HOLD), (25, MIN_HOLD), (125, 0.25), (1000, MAX_HOLD)])
def test_calm_events_wait_longer_the_more_nodes_there_are(num_nodes: int, hold: float) -> None:
    held = HeldEvents(num_nodes)
    held.add([STARTED], 10.0)
    assert held.next_due(10.0) == pytest.approx(hold)


def test_exits_are_calm_where_they_were_asked_for() -> None:
    held = HeldEvents()
    held.add([EXITED], 10.0, are_calm=True)
    assert held.next_due(10.0) == pytest.approx(MIN_HOLD)


def test_events_are_taken_some_at_a_time_however_many_there_are() -> None:
    # Of a thousand ranks there may always be one more; stops and snapshots have to come in between.
    with Commands([[], ["env"]]) as engine, Session(2, engine=engine, output="none", monitor=False) as session:
        session.run(print)
        tree: Any = tree_of(session)
        for _ in range(1000):
            tree.wake()
        assert len(tree.events(0)) < 500
