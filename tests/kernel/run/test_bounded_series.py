"""A series of bounded size drops its oldest values, and readers go on from where they were."""

from __future__ import annotations

from notebook_launcher.kernel.run.live_values import BoundedSeries


def test_reader_gets_what_is_new_to_it() -> None:
    series = BoundedSeries[str](100)
    assert series.since(0) == ([], 0)
    for value in "ab":
        series.append(value)
    assert series.since(0) == (["a", "b"], 2)
    series.append("c")
    assert series.since(2) == (["c"], 3)
    assert series.since(3) == ([], 3)


def test_oldest_tenth_is_dropped_beyond_the_limit() -> None:
    series = BoundedSeries[int](20)
    for value in range(20):
        series.append(value)
    assert series.values == list(range(20))
    series.append(20)
    assert series.values == list(range(2, 21))
    assert series.since(0) == (list(range(2, 21)), 21)
    assert series.since(19) == ([19, 20], 21)


def test_list_that_a_reader_holds_is_not_shortened() -> None:
    series = BoundedSeries[int](2)
    series.append(0)
    held = series.values
    for value in (1, 2):
        series.append(value)
    assert held == [0, 1, 2]
    assert series.values == [1, 2]


def test_limit_is_that_of_the_sizes() -> None:
    series = BoundedSeries[bytes](10, len)
    for value in (b"1234", b"5678", b"9"):
        series.append(value)
    assert series.values == [b"1234", b"5678", b"9"]
    series.append(b"10")
    assert series.values == [b"5678", b"9", b"10"]
    series.append(b"more than ten bytes")
    assert series.values == [b"9", b"10", b"more than ten bytes"]
    series.append(b"11")
    assert series.values == [b"10", b"more than ten bytes", b"11"]
