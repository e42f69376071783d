"""Rates of a rank: samples per second of elapsed time, over the last seconds and over the run."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_launcher import messages
from notebook_launcher.kernel.live import LiveRecords


def phases_of(time: float, *, spans: tuple[tuple[str, float, float], ...] = (), **fields: Any) -> messages.Phases:
    given = {"windows": 1, "micro_batches": 1, "samples": 8.0, "fullest": (1, 8.0), "num_fullest": 1, "counts": {}}
    return messages.Phases(**{**given, "seconds": {}, "time": time, "spans": spans, **fields})


def test_samples_are_counted_by_elapsed_time_not_by_the_time_in_phases() -> None:
    live = LiveRecords(launched=0.0)
    for at in range(20):  # 8 samples every 0.5 s, 0.01 s of which is spent inside of phases.
        live.fold(0, phases_of(at * 0.5 + 0.5, spans=(("step", at * 0.5 + 0.49, 0.01),), seconds={"step": 0.01}))
    assert live.samples_per_second(0) == pytest.approx(16.0, rel=0.05)
    assert live.samples_per_second(0, is_over=True) == pytest.approx(16.0, rel=0.06)


def test_samples_of_a_run_leave_out_what_comes_after_the_training() -> None:
    live = LiveRecords(launched=0.0)
    for end in (1.0, 2.0, 3.0):
        live.fold(0, phases_of(end, spans=(("step", end - 1.0, 1.0),)))
    live.fold(0, phases_of(4.0, spans=(("data", 3.5, 0.5),), samples=0.0, windows=0))
    live.fold(0, phases_of(60.0, samples=0.0, windows=0))  # The function ended after a long evaluation.
    assert live.samples_per_second(0, is_over=True) == pytest.approx(8.0)


def test_samples_of_one_record_have_a_rate() -> None:
    live = LiveRecords(launched=0.0)
    spans = tuple(("step", 9.9 + at * 0.01, 0.01) for at in range(10))  # The newest ones, of 0.2 s.
    live.fold(0, phases_of(20.0, spans=spans, seconds={"step": 0.2}))
    assert live.samples_per_second(0, is_over=True) == pytest.approx(40.0)


def test_samples_of_a_slow_run_change_with_its_last_seconds_while_it_goes_on() -> None:
    live = LiveRecords(launched=0.0)
    for end in range(1, 21):  # It trains at 8 samples a second, then ten times as fast.
        for part in range(1, 11):
            samples = 8.0 if end > 10 else 0.8
            live.fold(0, phases_of(end + part / 10, spans=(("step", end + part / 10 - 0.1, 0.1),), samples=samples))
    assert live.samples_per_second(0) == pytest.approx(80.0)
    assert live.samples_per_second(0, is_over=True) == pytest.approx(44.0)


def test_rank_that_counts_no_samples_has_no_rate() -> None:
    live = LiveRecords(launched=0.0)
    assert live.samples_per_second(0, is_over=True) is None
    live.fold(0, phases_of(1.0, windows=0, samples=0.0))
    live.fold(0, phases_of(2.0, windows=0, samples=0.0))
    assert live.samples_per_second(0, is_over=True) is None
