"""Curves of bounded size, and the records that views read."""

from __future__ import annotations

import math
import random

import pytest

from notebook_launcher.history.curves import MAX_CURVES, MAX_POINTS, Curve, Curves
from notebook_launcher.history.schema import MetricPoint, PhaseSpan, RankPhases, RunMetrics

SLACK = 8
"""Points that a curve may hold beyond `MAX_POINTS`: the extremes of what has not been put away yet."""


def point(rank: int = 0, step: int = 0, **values: float) -> MetricPoint:
    return MetricPoint(rank=rank, step=step, time=0.0, values=values)


def grown(num_points: int, value=math.sin) -> Curve:
    curve = Curve()
    for step in range(num_points):
        curve.extend([(step, value(step), 0.0)])
    return curve


def test_short_curve_keeps_every_point_and_a_long_one_is_bounded_and_keeps_its_order():
    for num_points in (0, 1, 2, MAX_POINTS):
        assert grown(num_points).points() == [(step, math.sin(step)) for step in range(num_points)]
    for num_points in (MAX_POINTS + 1, 33_333):
        curve = grown(num_points)
        steps = [step for step, _ in curve.points()]
        assert MAX_POINTS / 4 < len(steps) <= MAX_POINTS + SLACK
        assert steps == sorted(set(steps))
        assert (steps[-1], curve.count) == (num_points - 1, num_points)


@pytest.mark.parametrize("seed", range(2))
def test_thinning_keeps_the_highest_and_the_lowest_point(seed):
    rng = random.Random(seed)
    peaks = {rng.randrange(40_000): sign * rng.uniform(10, 20) for sign in (1, -1) for _ in range(20)}
    curve = grown(40_000, lambda step: peaks.get(step, 0.0))
    kept = dict(curve.points())
    highest, lowest = max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)
    assert kept[highest] == peaks[highest]
    assert kept[lowest] == peaks[lowest]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_thinning_keeps_a_non_finite_point_beside_the_peaks(value):
    curve = grown(40_000, lambda step: value if step == 4321 else float(step == 4322))
    kept = dict(curve.points())
    assert kept[4321] == value or math.isnan(kept[4321])
    assert kept[4322] == 1.0


@pytest.mark.parametrize("seed", range(2))
def test_batches_and_single_points_give_the_same_curve(seed):
    rng = random.Random(seed)
    values = [rng.choice([rng.gauss(0, 1), math.inf, 1e308]) for _ in range(30_000)]
    single, batched, at = grown(len(values), values.__getitem__), Curve(), 0
    while at < len(values):
        end = at + rng.choice([0, 1, 7, 500, 5_000])
        batched.extend([(step, value, 0.0) for step, value in enumerate(values)][at:end])
        at = end
    assert (batched.points(), batched.count, batched.stride) == (single.points(), len(values), single.stride)


def test_values_beyond_the_most_curves_are_counted_and_left_out():
    curves = Curves()
    curves.fold(point(0, step, **{f"metric {step}": 1.0}) for step in range(MAX_CURVES + 10))
    assert len(curves) == MAX_CURVES
    assert curves.num_left_out == 10
    curves.fold([point(0, 1, **{"metric 0": 2.0})])
    assert curves["metric 0"][0].count == 2


def test_metrics_print_a_few_lines_and_become_a_table():
    points = [point(step % 2, step, loss=1 / (step + 1)) for step in range(1500)]
    odd = MetricPoint(rank=0, step=1500, time=0.0, values={"acc": math.nan, "step": 3.0})
    more = [MetricPoint(rank=0, step=0, time=0.0, values={"m": 0.0, f"m{at}": 1.0}) for at in range(9)]
    metrics = RunMetrics([*points, odd, *more])
    assert repr(metrics).splitlines() == [
        "1,510 points of 2 ranks, step 0 to 1,500; a table: .to_pandas()",
        "  loss: 1 → 6.667e-4, from 6.667e-4 to 1",
        "  acc: NaN → NaN, 1 not finite",
        "  step: 3 → 3, from 3 to 3",
        "  m: 0 → 0, from 0 to 0",
        *(f"  m{at}: 1 → 1, from 1 to 1" for at in range(4)),
        "  5 more",
    ]
    assert "report(loss=loss)" in repr(RunMetrics())
    pytest.importorskip("pandas")
    table = metrics.to_pandas()
    assert (len(table), list(table)[:6]) == (1510, ["rank", "step", "time", "loss", "acc", "step_"])
    assert (table["loss"][1], table["step"][1500], table["step_"][1500]) == (0.5, 1500, 3.0)
    assert list(RunMetrics().to_pandas()) == ["rank", "step", "time"]


def test_shares_of_the_phases_add_up_to_one():
    spans = (PhaseSpan(phase="data", start=0.0, seconds=1.0),)
    phases = RankPhases(seconds={"data": 1.0, "forward": 3.0}, spans=spans)
    assert phases.shares == {"data": 0.25, "forward": 0.75}
    assert RankPhases(seconds={"data": 0.0}).shares == {"data": 0.0}
