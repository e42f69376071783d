"""Thinning, smoothing and averages of curves, for the static picture and the monitor's page alike."""

from __future__ import annotations

import math
from typing import Any

import pytest

from notebook_launcher.drawing.lines import mean_of, series_of, smooth
from notebook_launcher.history.curves import MAX_POINTS, Curve, extremes

NAN = math.nan

EXTREMES = [
    ([1], [0]),
    ([3, 1, 2], [0, 1]),
    ([1, 2, 3, 2], [0, 2]),
    ([2, 2, 2], [0]),
    ([NAN, 1, NAN, 5], [0, 1, 3]),
    ([NAN, NAN], [0]),
    ([5, -1e300, 1e300, NAN], [1, 2, 3]),
    ([1, NAN, 0, NAN, 1], [0, 1, 2]),
]

SMOOTHED = [
    (0.5, [1, 2, NAN, 4], [1.0, 5 / 3, NAN, 3.0]),
    (0.9, [10, 10, 10], [10.0, 10.0, 10.0]),
    (0.99, [0, 1, 0, NAN], [0.0, 0.5025125628140701, 0.3333221103666549, NAN]),
    (0.0, [3, 1, 2], [3.0, 1.0, 2.0]),
]

MEANS: dict[str, Any] = {
    "same steps": ([{0: 1, 1: 2, 2: 3}, {0: 3, 1: 2, 2: 7}], [2, 2, 5], [1, 2, 3], [3, 2, 7]),
    "one rank reports every other step": (
        [{0: 0, 1: 1, 2: 2, 3: 3, 4: 4}, {0: 10, 2: 30, 4: 10}],
        [5, 10.5, 16, 11.5, 7],
        [0, 1, 2, 3, 4],
        [10, 20, 30, 20, 10],
    ),
    "one rank starts later": ([{0: 4, 1: 4, 2: 4, 3: 4}, {2: 8, 3: 0}], [4, 4, 6, 2], [4, 4, 4, 0], [4, 4, 8, 4]),
    "one rank ends earlier": ([{0: 4, 1: 4, 2: 4, 3: 4}, {0: 8, 1: 0}], [6, 2, 4, 4], [4, 0, 4, 4], [8, 4, 4, 4]),
    "three ranks": ([{0: 1, 1: 1}, {0: 2, 1: 2}, {0: 6, 1: 0}], [3, 1], [1, 0], [6, 2]),
    "a value is not finite": ([{0: 1, 1: NAN, 2: 3}, {0: 3, 1: 2, 2: 7}], [2, NAN, 5], [1, 2, 3], [3, 2, 7]),
    "beside a value that is not finite": (
        [{0: 0, 1: 1, 2: 2, 3: 3, 4: 4}, {0: 10, 2: NAN, 4: 10}],
        [5, NAN, NAN, NAN, 7],
        [0, 1, 2, 3, 4],
        [10, 1, 2, 3, 10],
    ),
}
"""Values by step of each rank; the means, the lowest and the highest values."""


def curve_of(values: dict[int, float]) -> Curve:
    curve = Curve()
    curve.extend([(step, value, 0.0) for step, value in values.items()])
    return curve


@pytest.mark.parametrize(("values", "kept"), EXTREMES, ids=repr)
def test_stretch_keeps_its_extremes_and_its_first_gap(values, kept):
    points = [(step, value, 0.0) for step, value in enumerate(values)]
    assert [step for step, _, _ in extremes(points)] == kept


@pytest.mark.parametrize(("weight", "values", "smoothed"), SMOOTHED, ids=repr)
def test_smoothed_curve_is_corrected_for_its_start_and_keeps_gaps(weight, values, smoothed):
    found = [value for _, value in smooth(list(enumerate(values)), weight)]
    assert found == pytest.approx(smoothed, nan_ok=True)


def test_thinned_curve_is_smoothed_over_as_many_steps_as_a_whole_one():
    curve = curve_of({step: float(step >= 50_000) for step in range(100_000)})
    series = series_of("rank 0", curve, 0)
    assert len(series.points) < 3000
    smoothed = dict(smooth(series.points, 0.999, series.density))
    reached = min(step for step, value in smoothed.items() if value > 0.5)
    assert reached - 50_000 == pytest.approx(693, rel=0.15)  # log(0.5) / log(0.999)


@pytest.mark.parametrize(("ranks", "mean", "low", "high"), MEANS.values(), ids=MEANS)
def test_mean_of_ranks_has_a_band_from_the_lowest_to_the_highest(ranks, mean, low, high):
    series = mean_of("mean", map(curve_of, ranks), 0)
    assert [step for step, _ in series.points] == list(range(len(mean)))
    assert [value for _, value in series.points] == pytest.approx(mean, nan_ok=True)
    assert [(step, *ends) for step, *ends in series.band] == list(zip(range(len(mean)), low, high, strict=True))


@pytest.mark.parametrize(
    ("length", "exceptions"),
    [(10_000, {0: -3, 777: NAN, 5432: 99, 9998: -50}), (3000, {1: 1e300, 2: -1e300, 2999: NAN})],
)
def test_thinned_curve_keeps_every_peak_and_gap(length, exceptions):
    curve = curve_of({step: exceptions.get(step, step % 7) for step in range(length)})
    kept = dict(curve.points())
    assert len(kept) <= MAX_POINTS + 4
    assert {step: kept[step] for step in exceptions} == pytest.approx(exceptions, nan_ok=True)
    assert curve.has_gaps
    assert curve.last is not None
    assert curve.last[1] == pytest.approx(exceptions.get(length - 1, (length - 1) % 7), nan_ok=True)
