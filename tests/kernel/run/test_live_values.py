"""Live values of a run: sums of the phases, and samples per second over the last seconds and over the whole run."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_launcher.history.schema import MAX_SPANS
from notebook_launcher.kernel.run.live_values import LiveValues
from notebook_launcher.messaging import messages


def record_of(time: float = 12.0, **fields: Any) -> messages.Phases:
    given = {"windows": 1, "micro_batches": 2, "samples": 8.0, "fullest": (2, 8.0), "num_fullest": 1, "counts": {}}
    return messages.Phases(**{**given, "time": time, "seconds": {}, "spans": (), **fields})


def test_kernel_sums_up_and_keeps_the_newest_spans() -> None:
    live = LiveValues(launched=10.0)
    spans = tuple(("forward", 10.0 + at, 0.5) for at in range(64))
    for _ in range(100):
        live.fold(1, record_of(seconds={"forward": 3.0, "data": 1.0}, counts={"forward": 64, "data": 1}, spans=spans))
    known = live.phases[1]
    assert (known.windows, known.micro_batches, known.samples) == (100, 200, 800.0)
    assert (known.seconds, known.counts) == ({"forward": 300.0, "data": 100.0}, {"forward": 6400, "data": 100})
    assert known.shares == {"forward": 0.75, "data": 0.25}
    assert len(known.spans) == MAX_SPANS
    assert (known.spans[-1].phase, known.spans[-1].start, known.spans[-1].seconds) == ("forward", 63.0, 0.5)


def test_ranks_that_do_not_come_back_leave_the_phases_and_the_metrics() -> None:
    live = LiveValues(launched=0.0)
    for rank in (0, 1):
        live.fold(rank, record_of(seconds={"forward": 3.0}, counts={"forward": 1}, spans=()))
        live.fold(rank, messages.Metrics(values={"loss": 1.0}, step=1, time=1.0))
    live.note_fewer_ranks(2, 1, seconds=4.0)
    assert list(live.phases) == list(live.last_values) == list(live.last_steps) == [0]
    assert live.samples_per_second(1) is None
    assert [(change.name, change.before, change.after) for change in live.changes] == [("num_processes", 2, 1)]


def test_samples_are_counted_by_elapsed_time_not_by_the_time_in_phases() -> None:
    live = LiveValues(launched=0.0)
    for at in range(20):  # 8 samples every 0.5 s, 0.01 s of which is spent inside of phases.
        live.fold(0, record_of(at * 0.5 + 0.5, spans=(("step", at * 0.5 + 0.49, 0.01),), seconds={"step": 0.01}))
    assert live.samples_per_second(0) == pytest.approx(16.0, rel=0.05)
    assert live.samples_per_second(0, is_over=True) == pytest.approx(16.0, rel=0.06)


def test_samples_of_a_run_leave_out_what_comes_after_the_training() -> None:
    live = LiveValues(launched=0.0)
    for end in (1.0, 2.0, 3.0):
        live.fold(0, record_of(end, spans=(("step", end - 1.0, 1.0),)))
    live.fold(0, record_of(4.0, spans=(("data", 3.5, 0.5),), samples=0.0, windows=0))
    live.fold(0, record_of(60.0, samples=0.0, windows=0))  # The function ended after a long evaluation.
    assert live.samples_per_second(0, is_over=True) == pytest.approx(8.0)


def test_samples_of_a_slow_run_change_with_its_last_seconds_while_it_goes_on() -> None:
    live = LiveValues(launched=0.0)
    for end in range(1, 21):  # It trains at 8 samples a second, then ten times as fast.
        for part in range(1, 11):
            samples = 8.0 if end > 10 else 0.8
            live.fold(0, record_of(end + part / 10, spans=(("step", end + part / 10 - 0.1, 0.1),), samples=samples))
    assert live.samples_per_second(0) == pytest.approx(80.0)
    assert live.samples_per_second(0, is_over=True) == pytest.approx(44.0)
