"""A series of bounded size drops its oldest values, and readers go on from where they were."""

from __future__ import annotations

from notebook_launcher.kernel.run.live_values import BoundedSeries


def test_oldest_tenth_is_dropped_beyond_the_limit_and_readers_go_on() -> None:
    series = BoundedSeries[int](20, lambda _: 1)
    assert series.since(0) == ([], 0)
    for value in range(20):
        series.append(value)
    held = series.values
    assert series.since(18) == ([18, 19], 20)
    series.append(20)
    assert held == list(range(21))  # What a reader holds is not shortened.
    assert series.values == list(range(2, 21))
    assert series.since(0) == (list(range(2, 21)), 21)
    assert series.since(19) == ([19, 20], 21)


def test_limit_is_that_of_the_sizes() -> None:
    series = BoundedSeries[bytes](10, len)
    for value in (b"1234", b"5678", b"9"):
        series.append(value)
    assert series.values == [b"1234", b"5678", b"9"]
    series.append(b"10")
    assert series.values == [b"5678", b"9", b"10"]
    series.append(b"more than ten bytes")
    assert series.values == [b"9", b"10", b"more than ten bytes"]
