"""Metrics are packed, come back as they were, and the oldest are dropped."""

from __future__ import annotations

import math
import pickle
import tracemalloc

import pytest

from notebook_launcher.history.schema import MetricPoint
from notebook_launcher.kernel.run.live_values import CHUNK, MetricSeries


def point(number: int) -> MetricPoint:
    values = {"loss": 1.0 / (number + 1)} if number % 3 else {"loss": math.inf, "accuracy": number / 7, "a b": -0.0}
    return MetricPoint(rank=number % 5, step=number * 10, time=number / 8, values={} if number % 11 == 0 else values)


@pytest.mark.parametrize("count", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 17])
def test_points_come_back_as_they_were(count: int) -> None:
    series = MetricSeries(10 * CHUNK)
    points = [point(number) for number in range(count)]
    for each in points:
        series.append(each)
    assert series.since(0) == (points, count)


def test_reader_gets_what_is_new_to_it() -> None:
    series, position = MetricSeries(10 * CHUNK), 0
    got: list[MetricPoint] = []
    points = [point(number) for number in range(2 * CHUNK + 9)]
    for number, each in enumerate(points):
        series.append(each)
        if number % 999 == 0:
            new, position = series.since(position)
            got += new
    new, position = series.since(position)
    assert [*got, *new] == points
    assert position == len(points)
    assert series.since(position) == ([], position)


def test_oldest_tenth_is_dropped_beyond_the_limit() -> None:
    series, count = MetricSeries(10 * CHUNK), 11 * CHUNK + 5
    points = [point(number) for number in range(count)]
    for each in points:
        series.append(each)
    assert series.since(0) == (points[CHUNK:], count)
    assert series.since(CHUNK + 3) == (points[CHUNK + 3 :], count)


@pytest.mark.parametrize("count", [1, CHUNK])
def test_points_that_a_reader_holds_do_not_change(count: int) -> None:
    series = MetricSeries(4 * CHUNK)
    points = [point(number) for number in range(count)]
    for each in points:
        series.append(each)
    held, _ = series.since(0)
    for number in range(4 * CHUNK):
        series.append(point(number))
    assert held == points
    assert len(held) == count


def test_points_are_a_sequence() -> None:
    series = MetricSeries(10 * CHUNK)
    points = [point(number) for number in range(2 * CHUNK + 3)]
    for each in points:
        series.append(each)
    found, expected = series.since(5)[0], points[5:]
    for at in (0, 1, CHUNK - 6, CHUNK - 5, CHUNK, 2 * CHUNK - 3, -1, -4):
        assert found[at] == expected[at]
    assert found[3:CHUNK:7] == expected[3:CHUNK:7]
    assert expected[-1] in found
    assert pickle.loads(pickle.dumps(found)) == expected
    with pytest.raises(IndexError, match="out of range"):
        found[len(expected)]


def test_packed_points_take_less_than_60_bytes() -> None:
    tracemalloc.start()
    try:
        series, count = MetricSeries(10**6), 4 * CHUNK
        for number in range(count):
            series.append(MetricPoint(rank=0, step=number, time=number / 8, values={"loss": number / 3}))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / count < 60
