"""Live values of a run: its metrics, the sums of its phases, and the rates of its loops and samples."""

from __future__ import annotations

import math
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import pytest

from notebook_launcher import context, reporting
from notebook_launcher.history.schema import MAX_SPANS, MetricPoint
from notebook_launcher.kernel.metering import SamplePace
from notebook_launcher.kernel.run.live_values import CHUNK, BoundedSeries, LiveValues, MetricSeries
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Iterable


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


def test_samples_are_counted_by_elapsed_time_without_what_comes_after_the_training() -> None:
    live = LiveValues(launched=0.0)
    for at in range(20):  # 8 samples every 0.5 s, 0.01 s of which is spent inside of phases.
        live.fold(0, record_of(at * 0.5 + 0.5, spans=(("step", at * 0.5 + 0.49, 0.01),), seconds={"step": 0.01}))
    assert live.samples_per_second(0) == pytest.approx(16.0, rel=0.05)
    live.fold(0, record_of(11.0, spans=(("data", 10.5, 0.5),), samples=0.0, windows=0))
    live.fold(0, record_of(60.0, samples=0.0, windows=0))  # The function ended after a long evaluation.
    assert live.samples_per_second(0, is_over=True) == pytest.approx(16.0, rel=0.06)


def test_samples_of_a_slow_run_change_with_its_last_seconds_while_it_goes_on() -> None:
    live = LiveValues(launched=0.0)
    for end in range(1, 21):  # It trains at 8 samples a second, then ten times as fast.
        for part in range(1, 11):
            samples = 8.0 if end > 10 else 0.8
            live.fold(0, record_of(end + part / 10, spans=(("step", end + part / 10 - 0.1, 0.1),), samples=samples))
    assert live.samples_per_second(0) == pytest.approx(80.0)
    assert live.samples_per_second(0, is_over=True) == pytest.approx(44.0)


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


def point(number: int) -> MetricPoint:
    values = {"loss": 1.0 / (number + 1)} if number % 3 else {"loss": math.inf, "accuracy": number / 7, "a b": -0.0}
    return MetricPoint(rank=number % 5, step=number * 10, time=number / 8, values={} if number % 11 == 0 else values)


def series_of(points: Iterable[MetricPoint], limit: int = 10 * CHUNK) -> MetricSeries:
    series = MetricSeries(limit)
    for each in points:
        series.append(each)
    return series


@pytest.mark.parametrize("count", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 17])
def test_metrics_come_back_as_they_were_and_a_reader_gets_what_is_new_to_it(count: int) -> None:
    points = [point(number) for number in range(count)]
    series, position = MetricSeries(10 * CHUNK), 0
    got: list[MetricPoint] = []
    for number, each in enumerate(points):
        series.append(each)
        if number % 999 == 0:
            new, position = series.since(position)
            got += new
    new, position = series.since(position)
    assert ([*got, *new], position) == series.since(0) == (points, count)
    assert series.since(position) == ([], position)


@pytest.mark.parametrize("num_held", [1, CHUNK])
def test_oldest_tenth_of_the_metrics_is_dropped_beyond_the_limit_and_what_a_reader_holds_stays(num_held: int) -> None:
    count = 11 * CHUNK + 5
    points = [point(number) for number in range(count)]
    series = series_of(points[:num_held])
    held, _ = series.since(0)
    for each in points[num_held:]:
        series.append(each)
    assert held == points[:num_held]
    assert series.since(0) == (points[CHUNK:], count)
    assert series.since(CHUNK + 3) == (points[CHUNK + 3 :], count)


def test_packed_metrics_take_less_than_60_bytes() -> None:
    count = 4 * CHUNK
    tracemalloc.start()
    try:
        points = (MetricPoint(rank=0, step=at, time=at / 8, values={"loss": at / 3}) for at in range(count))
        series = series_of(points, 10**6)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / series.since(0)[1] < 60


def test_oldest_tenth_of_a_series_is_dropped_beyond_the_limit_of_the_sizes_and_readers_go_on() -> None:
    numbers = BoundedSeries[int](20, lambda _: 1)
    assert numbers.since(0) == ([], 0)
    for value in range(20):
        numbers.append(value)
    held = numbers.values
    assert numbers.since(18) == ([18, 19], 20)
    numbers.append(20)
    assert held == list(range(21))  # What a reader holds is not shortened.
    assert numbers.values == list(range(2, 21))
    assert numbers.since(0) == (list(range(2, 21)), 21)
    assert numbers.since(19) == ([19, 20], 21)
    series = BoundedSeries[bytes](10, len)
    for picture in (b"1234", b"5678", b"9"):
        series.append(picture)
    assert series.values == [b"1234", b"5678", b"9"]
    series.append(b"10")
    assert series.values == [b"5678", b"9", b"10"]
    series.append(b"more than ten bytes")
    assert series.values == [b"9", b"10", b"more than ten bytes"]
