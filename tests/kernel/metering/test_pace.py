"""Rates of a rank: items of its loops per second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest

from notebook_launcher import context, reporting
from notebook_launcher.kernel.metering import SamplePace
from notebook_launcher.kernel.run.live_values import LiveValues
from notebook_launcher.messaging import messages


def progress_of(time: float, *, items: int, loops: int, total: int = 4) -> messages.Progress:
    done = (items - 1) % total + 1
    return messages.Progress(time=time, done=done, total=total, description="", loops=loops, items=items)


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


def test_pause_counts_in_no_rate() -> None:
    live = LiveValues(launched=0.0)

    def change(time: float, action: Literal["pause", "resume"]) -> None:
        live.note_change(messages.Changed(time=time, update=1, action=action, values={}, source="code"))

    pace = SamplePace()
    live._sample_rates[0] = pace
    for item in range(1, 11):
        live.fold(0, progress_of(float(item), items=item, loops=1, total=100))
        pace.add(float(item), 8.0, (), 0.0)
    change(10.25, "pause")
    change(70.25, "resume")
    assert live.items_per_second(0) == pytest.approx(1.0)
    for item in range(11, 14):
        live.fold(0, progress_of(60.0 + item, items=item, loops=1, total=100))
        pace.add(60.0 + item, 8.0, (), 0.0)
        assert live.items_per_second(0) == pytest.approx(1.0)
        assert live.samples_per_second(0) == pytest.approx(8.0)
    assert live.samples_per_second(0, is_over=True) == pytest.approx(8.0)
