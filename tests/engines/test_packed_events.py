"""Events of nodes on their way to the kernel: packed, held for a moment, taken some at a time."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from notebook_launcher.engines.board import LiveRecords
from notebook_launcher.engines.cluster.node_records import HOLD, HeldEvents
from notebook_launcher.engines.engine import FromRank, Output, RankLost, Woken
from notebook_launcher.kernel.run.live_values import LiveValues
from notebook_launcher.messaging import messages

METRICS = messages.Metrics(time=5.0, step=3, values={"loss": 0.5})
PROGRESS = messages.Progress(time=5.0, done=1, total=None, description="train", loops=1, items=1)
PHASES = messages.Phases(
    time=5.0, windows=1, micro_batches=2, samples=8.0, fullest=(2, 8.0), num_fullest=1, seconds={"sync": 0.1},
    counts={"sync": 1}, spans=(("sync", 4.0, 0.1),), settings={"lr": 0.1}, since=3.0,
)  # fmt: skip
STARTED = FromRank(2, messages.CallStarted(call_id=1), [])
EXITED = RankLost(messages.RankExited(rank=2, pid=1, exitcode=0, time=5.0, peak_rss=0, oom=False))


def taken_from(*events: Any) -> list[Any]:
    """Return what a kernel makes of events that an agent has held, if its clock is 100 s ahead."""
    held = HeldEvents()
    held.add(events, 10.0)
    return [
        LiveRecords(event, 100.0) if isinstance(event, bytes) else event
        for event in pickle.loads(pickle.dumps(held.take()))
    ]


def test_events_are_the_same_and_in_their_order_at_the_other_end() -> None:
    output = Output(2, "stderr", b"x")
    events = [FromRank(2, METRICS, []), FromRank(3, PROGRESS, []), output, FromRank(2, PHASES, []), STARTED]
    first, *others = taken_from(*events)
    assert list(first) == [(2, METRICS), (3, PROGRESS)]
    assert others[0] == output
    assert list(others[1]) == [(2, PHASES)]
    assert first.offset == others[1].offset == 100.0
    assert others[2] is not STARTED
    assert others[2] == STARTED


def test_packed_records_add_up_to_the_same_with_times_by_the_clock_of_the_kernel() -> None:
    here, there = LiveValues(launched=0.0), LiveValues(launched=100.0)
    for record in (METRICS, PROGRESS, PHASES, PHASES):
        here.fold(2, record)
    events = [FromRank(2, record, []) for record in (METRICS, PROGRESS, PHASES, PHASES)]
    for records in taken_from(*events):
        there.fold_all(records)
    assert here.metric_series.since(0) == there.metric_series.since(0)
    assert here.phases == there.phases
    assert here.phases[2].spans[0].start == 4.0
    assert here.progress == there.progress
    assert here.settings.present() == there.settings.present()
    assert here.samples_per_second(2) == pytest.approx(there.samples_per_second(2))


def test_spans_keep_their_times_when_the_clock_of_their_machine_is_measured_again() -> None:
    live = LiveValues(launched=0.0)
    pickled = pickle.dumps([(2, PHASES)])
    for offset in (0.0, 0.0, 7.0):
        live.fold_all(LiveRecords(pickled, offset))
    assert [span.start for span in live.phases[2].spans] == [4.0, 4.0, 11.0]


def test_calm_events_wait_for_others_and_urgent_ones_take_them_along() -> None:
    held = HeldEvents()
    held.add([Woken()], 0.0)
    assert held.next_due(10.0) == float("inf")
    held.add([FromRank(2, METRICS, [])], 10.0)
    held.add([Output(2, "stdout", b"x")], 10.0 + HOLD / 2)
    assert held.next_due(10.0) == pytest.approx(HOLD)
    assert held.next_due(10.0 + HOLD) == 0
    held.add([EXITED], 10.0)
    assert held.next_due(10.0) == 0
    taken = held.take()
    assert [type(event) for event in taken] == [bytes, Output, RankLost]
    assert held.take() == ()
