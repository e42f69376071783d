"""Several curves merged into one: the mean over ranks with their range, and a smoothed line."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.history.curves import Curve

__all__ = ["Series", "mean_of", "series_of", "smooth"]

MAX_BUCKETS = 256
"""Number of intervals of steps over which values are averaged, if ranks report at different steps."""
LARGEST_STEP = 10**15
"""Largest step; a picture cannot show larger steps apart, so they count as this one."""

Point = tuple[int, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot."""

    label: str
    points: Sequence[Point]
    """Points (step, value) in the order of arrival; values may be NaN or infinite."""
    band: Sequence[tuple[int, float, float]] = ()
    """Range around the line, as (step, lowest, highest)."""
    style: int = 0
    """Number of the line's style; each label has its own."""


def series_of(label: str, curve: Curve, style: int) -> Series:
    """Return the line of one rank."""
    return Series(label=label, points=_points_of(curve), style=style)


def _points_of(curve: Curve) -> list[Point]:
    return [(min(max(step, -LARGEST_STEP), LARGEST_STEP), float(value)) for step, value in curve.points()]


def mean_of(label: str, curves: Iterable[Curve], style: int) -> Series:
    """Return the mean over ranks, and the lowest and highest of them as its band.

    Ranks that report at the same steps are averaged step by step. Otherwise each rank's values are averaged over
    intervals of steps, and interpolated between its first and last step. Where a rank is NaN or infinite, so is the
    mean.
    """
    every = [points for curve in curves if (points := sorted(_points_of(curve), key=lambda point: point[0]))]
    if not every:
        return Series(label=label, points=(), style=style)
    steps = [step for step, _ in every[0]]
    distinct = all(before < after for before, after in itertools.pairwise(steps))
    if distinct and all([step for step, _ in points] == steps for points in every):
        columns: list[list[float]] = [list(values) for values in zip(*([v for _, v in p] for p in every), strict=True)]
    else:
        steps, columns = _bucketed(every)
    points = [(step, _mean(values)) for step, values in zip(steps, columns, strict=True) if values]
    band = [(step, min(finite), max(finite)) for step, finite in _finite(steps, columns)] if len(every) > 1 else []
    return Series(label=label, points=points, band=band, style=style)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _finite(steps: Sequence[int], columns: Sequence[Sequence[float]]) -> Iterable[tuple[int, list[float]]]:
    for step, values in zip(steps, columns, strict=True):
        if finite := [value for value in values if math.isfinite(value)]:
            yield step, finite


def _bucketed(every: Sequence[Sequence[Point]]) -> tuple[list[int], list[list[float]]]:
    low, high = min(points[0][0] for points in every), max(points[-1][0] for points in every)
    num = min(MAX_BUCKETS, high - low + 1, max(len({step for step, _ in points}) for points in every))
    columns: list[list[float]] = [[] for _ in range(num)]
    for points in every:
        for bucket, value in _rank_buckets(points, low, high, num):
            columns[bucket].append(value)
    steps = [round(low + (high - low) * (bucket + 0.5) / num) for bucket in range(num)] if high > low else [low]
    return steps, columns


def _rank_buckets(points: Sequence[Point], low: int, high: int, num: int) -> list[tuple[int, float]]:
    held: dict[int, list[float]] = {}
    for step, value in points:
        held.setdefault(min((step - low) * num // max(high - low, 1), num - 1), []).append(value)
    means = [(bucket, _mean(values)) for bucket, values in sorted(held.items())]
    filled = means[:1]
    for (left, before), (right, after) in itertools.pairwise(means):
        # Where a neighbour is NaN, what lies between is as well.
        slope = (after - before) / (right - left)
        filled += [(bucket, before + slope * (bucket - left)) for bucket in range(left + 1, right)]
        filled.append((right, after))
    return filled


def smooth(points: Sequence[Point], weight: float) -> list[Point]:
    """Return the exponential moving average, corrected for its start; values that are not finite stay as they are.

    Args:
        points: (step, value).
        weight: What the past counts for, 0 (none) to less than 1.
    """
    smoothed, total, count = [], 0.0, 0
    for step, value in points:
        if not math.isfinite(value):
            smoothed.append((step, value))
            continue
        count += 1
        total = weight * total + (1 - weight) * value
        smoothed.append((step, total / (1 - weight**count)))
    return smoothed
