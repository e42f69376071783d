"""Several curves merged into one: the mean over ranks with their range, and a smoothed line."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from notebook_launcher.drawing.charts import by_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.drawing.charts import Places
    from notebook_launcher.history.curves import Curve

__all__ = ["Series", "mean_of", "series_of", "smooth"]

MAX_BUCKETS = 512
"""Number of intervals of steps over which values are averaged, if ranks report at different steps."""

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot."""

    label: str
    points: Sequence[Point]
    """Points (place on the axis, value) in the order of arrival; values may be NaN or infinite."""
    band: Sequence[tuple[float, float, float]] = ()
    """Range around the line, as (place, lowest, highest)."""
    style: int = 0
    """Number of the line's style; each label has its own."""
    stride: float = 1.0
    """Reported values for each point, on average: more than 1 where the curve was thinned."""


def series_of(label: str, curve: Curve, style: int, places: Places = by_step) -> Series:
    """Return the line of one rank."""
    points = places(curve)
    return Series(label=label, points=points, style=style, stride=_stride([curve], len(points)))


def _stride(curves: Iterable[Curve], num_points: int) -> float:
    """Return the values for each point, to two digits: a smoothed line then seldom changes as a whole."""
    return max(1.0, float(f"{max(curve.count for curve in curves) / max(num_points, 1):.2g}"))


def mean_of(label: str, curves: Iterable[Curve], style: int, places: Places = by_step) -> Series:
    """Return the mean over ranks, and the lowest and highest of them as its band.

    Ranks that report at the same steps are averaged step by step, as far as each has come. Otherwise each rank's
    values are averaged over intervals of steps, and interpolated between its first and last step. Where a rank is NaN
    or infinite, so is the mean.
    """
    curves = list(curves)
    every = [points for curve in curves if (points := sorted(places(curve), key=lambda point: point[0]))]
    if not every:
        return Series(label=label, points=(), style=style)
    steps = [step for step, _ in max(every, key=len)]
    distinct = all(before < after for before, after in itertools.pairwise(steps))
    # During a run some ranks are a report ahead.
    if distinct and all([step for step, _ in points] == steps[: len(points)] for points in every):
        columns = [[points[at][1] for points in every if at < len(points)] for at in range(len(steps))]
    else:
        steps, columns = _bucketed(every)
    points = [(step, _mean(values)) for step, values in zip(steps, columns, strict=True) if values]
    band = [(step, min(finite), max(finite)) for step, finite in _finite(steps, columns)] if len(every) > 1 else []
    return Series(label=label, points=points, band=band, style=style, stride=_stride(curves, len(points)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _finite(steps: Sequence[float], columns: Sequence[Sequence[float]]) -> Iterable[tuple[float, list[float]]]:
    for step, values in zip(steps, columns, strict=True):
        if finite := [value for value in values if math.isfinite(value)]:
            yield step, finite


def _bucketed(every: Sequence[Sequence[Point]]) -> tuple[list[float], list[list[float]]]:
    low, high = min(points[0][0] for points in every), max(points[-1][0] for points in every)
    whole = all(isinstance(step, int) for points in every for step, _ in points)
    most = max(len({step for step, _ in points}) for points in every)
    num = min(MAX_BUCKETS, int(high - low) + 1 if whole else MAX_BUCKETS, most)
    columns: list[list[float]] = [[] for _ in range(num)]
    for points in every:
        for bucket, value in _rank_buckets(points, low, high, num):
            columns[bucket].append(value)
    middles = [low + (high - low) * (bucket + 0.5) / num for bucket in range(num)] if high > low else [low]
    return [round(middle) for middle in middles] if whole else middles, columns


def _rank_buckets(points: Sequence[Point], low: float, high: float, num: int) -> list[tuple[int, float]]:
    held: dict[int, list[float]] = {}
    for step, value in points:
        bucket = int((step - low) * num // (high - low)) if high > low else 0
        held.setdefault(min(bucket, num - 1), []).append(value)
    means = [(bucket, _mean(values)) for bucket, values in sorted(held.items())]
    filled = means[:1]
    for (left, before), (right, after) in itertools.pairwise(means):
        # Where a neighbour is NaN, what lies between is as well.
        slope = (after - before) / (right - left)
        filled += [(bucket, before + slope * (bucket - left)) for bucket in range(left + 1, right)]
        filled.append((right, after))
    return filled


def smooth(points: Sequence[Point], weight: float, stride: float = 1.0) -> list[Point]:
    """Return the exponential moving average, corrected for its start; values that are not finite stay as they are.

    Args:
        points: (step, value).
        weight: Weight of the past, 0 (none) to less than 1.
        stride: Values for each point: a thinned curve is smoothed over as many steps as a whole one.
    """
    weight = weight**stride
    smoothed, total, count = [], 0.0, 0
    for step, value in points:
        if not math.isfinite(value):
            smoothed.append((step, value))
            continue
        count += 1
        total = weight * total + (1 - weight) * value
        smoothed.append((step, total / (1 - weight**count)))
    return smoothed
