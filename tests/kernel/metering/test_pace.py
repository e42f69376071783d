"""Rates of a rank: samples per second of elapsed time, over the last seconds and over the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from notebook_launcher import context, reporting
from notebook_launcher.kernel.run.live_values import LiveValues
from notebook_launcher.messaging import messages


def phases_of(time: float, *, spans: tuple[tuple[str, float, float], ...] = (), **fields: Any) -> messages.Phases:
    given = {"windows": 1, "micro_batches": 1, "samples": 8.0, "fullest": (1, 8.0), "num_fullest": 1, "counts": {}}
    return messages.Phases(**{**given, "seconds": {}, "time": time, "spans": spans, **fields})


def progress_of(time: float, *, items: int, loops: int, total: int = 4) -> messages.Progress:
    done = (items - 1) % total + 1
    return messages.Progress(time=time, done=done, total=total, description="", loops=loops, items=items)


def test_samples_are_counted_by_elapsed_time_not_by_the_time_in_phases() -> None:
    live = LiveValues(launched=0.0)
    for at in range(20):  # 8 samples every 0.5 s, 0.01 s of which is spent inside of phases.
        live.fold(0, phases_of(at * 0.5 + 0.5, spans=(("step", at * 0.5 + 0.49, 0.01),), seconds={"step": 0.01}))
    assert live.samples_per_second(0) == pytest.approx(16.0, rel=0.05)
    assert live.samples_per_second(0, is_over=True) == pytest.approx(16.0, rel=0.06)


def test_samples_of_a_run_leave_out_what_comes_after_the_training() -> None:
    live = LiveValues(launched=0.0)
    for end in (1.0, 2.0, 3.0):
        live.fold(0, phases_of(end, spans=(("step", end - 1.0, 1.0),)))
    live.fold(0, phases_of(4.0, spans=(("data", 3.5, 0.5),), samples=0.0, windows=0))
    live.fold(0, phases_of(60.0, samples=0.0, windows=0))  # The function ended after a long evaluation.
    assert live.samples_per_second(0, is_over=True) == pytest.approx(8.0)


def test_samples_of_one_record_have_a_rate() -> None:
    live = LiveValues(launched=0.0)
    spans = tuple(("step", 9.9 + at * 0.01, 0.01) for at in range(10))  # The newest ones, of 0.2 s.
    live.fold(0, phases_of(20.0, spans=spans, seconds={"step": 0.2}, since=9.8))
    assert live.samples_per_second(0, is_over=True) == pytest.approx(40.0)


def test_samples_of_a_slow_run_change_with_its_last_seconds_while_it_goes_on() -> None:
    live = LiveValues(launched=0.0)
    for end in range(1, 21):  # It trains at 8 samples a second, then ten times as fast.
        for part in range(1, 11):
            samples = 8.0 if end > 10 else 0.8
            live.fold(0, phases_of(end + part / 10, spans=(("step", end + part / 10 - 0.1, 0.1),), samples=samples))
    assert live.samples_per_second(0) == pytest.approx(80.0)
    assert live.samples_per_second(0, is_over=True) == pytest.approx(44.0)


def test_rank_that_counts_no_samples_has_no_rate() -> None:
    live = LiveValues(launched=0.0)
    assert live.samples_per_second(0, is_over=True) is None
    live.fold(0, phases_of(1.0, windows=0, samples=0.0))
    live.fold(0, phases_of(2.0, windows=0, samples=0.0))
    assert live.samples_per_second(0, is_over=True) is None


def test_pace_of_short_loops_is_measured_across_them() -> None:
    live = LiveValues(launched=0.0)
    for loop in range(1, 101):  # 4 items in 0.04 s, and a pause of 0.16 s, so that only each end of a loop is seen.
        live.fold(0, progress_of(loop * 0.2, items=4 * loop, loops=loop))
        if loop > 2:
            assert live.items_per_second(0) == pytest.approx(20.0)


def test_pace_of_a_long_loop_is_its_own_after_a_second() -> None:
    live = LiveValues(launched=0.0)
    for item in range(1, 31):
        live.fold(0, progress_of(item * 0.1, items=item, loops=1, total=100))
    for item in range(1, 31):
        live.fold(0, progress_of(3.0 + item, items=30 + item, loops=2, total=100))
        if item > 1:
            assert live.items_per_second(0) == pytest.approx(1.0)


def test_pace_restarts_with_a_restarted_rank() -> None:
    live = LiveValues(launched=0.0)
    for item in range(1, 5):
        live.fold(0, progress_of(item * 0.1, items=item, loops=1))
    live.fold(0, progress_of(0.8, items=1, loops=1))
    assert live.items_per_second(0) is None
    live.fold(0, progress_of(1.3, items=2, loops=1))
    assert live.items_per_second(0) == pytest.approx(2.0)


def test_items_are_counted_over_all_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[messages.Progress] = []
    own = SimpleNamespace(rank=0, send=sent.append, board=bytearray(4096), num_items=0, num_loops=0, last_progress=-1e9)
    monkeypatch.setattr(context._Current, "context", own)
    for _ in reporting.track(range(3)):
        for _ in reporting.track(range(10)):
            pass
        for _ in reporting.track(range(10)):  # What is left early counts, too.
            if _ == 4:
                break
    last = sent[-1]
    assert (last.done, last.total, last.items, last.loops) == (3, 3, 3 * (10 + 4), 1)
    for done in (1, 2, 3):
        reporting.progress(done, 3)
    assert (sent[-1].items, sent[-1].loops) == (45, 8)
