"""Metrics as curves of bounded size: a run of any length takes a fixed amount of memory and of ink."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_launcher.history.schema import MetricPoint

Point = tuple[int, float, float]
"""A step, a value, and the seconds from the launch to the report."""

MAX_POINTS = 2000
"""Points of a curve: more than a plot has pixels."""
MAX_CURVES = 1024
"""Curves of a run, one for each metric and rank. Values of further curves are counted and left out."""


class Curve:
    """Values by step, thinned as they grow so that every peak stays.

    Of each `stride` points the curve keeps the lowest, the highest and, if there is one, one that is not finite.
    """

    def __init__(self) -> None:
        self.stride = 1
        self.count = 0
        self.last: Point | None = None
        self.has_gaps = False
        self._points: list[Point] = []
        self._pending: list[Point] = []

    def extend(self, points: Sequence[Point]) -> None:
        """Add points in the order of arrival."""
        self.count += len(points)
        self.last = points[-1] if points else self.last
        self.has_gaps = self.has_gaps or not all(math.isfinite(value) for _, value, _ in points)
        self._pending += points
        while len(self._pending) >= self.stride:
            self._put_away()

    def _put_away(self) -> None:
        # Stops where a curve that grows by single points would be thinned, so that batches give the same curve.
        room, stride = MAX_POINTS + 1 - len(self._points), self.stride
        if stride == 1:
            taken = room
            self._points += self._pending[:taken]
        else:
            taken = 0
            while len(self._points) <= MAX_POINTS and taken + stride <= len(self._pending):
                self._points += extremes(self._pending[taken : taken + stride])
                taken += stride
        del self._pending[:taken]
        if len(self._points) > MAX_POINTS:
            self._thin()

    def _thin(self) -> None:
        # Two points stand for a bucket, so four points stand for a bucket of twice the size.
        width = 4
        points, self._points = self._points, []
        for start in range(0, len(points), width):
            self._points += extremes(points[start : start + width])
        self.stride = width if self.stride == 1 else 2 * self.stride

    def points(self) -> list[tuple[int, float]]:
        """Return (step, value) in the order of arrival, the newest included: at most `MAX_POINTS` and a few."""
        return [(step, value) for step, value, _ in self.timed_points()]

    def timed_points(self) -> list[Point]:
        """Return the points with their times, otherwise as `points`."""
        if not self._pending:
            return list(self._points)
        kept = self._points + extremes(self._pending)
        return kept if kept[-1] is self._pending[-1] else [*kept, self._pending[-1]]


class Curves(dict[str, dict[int, Curve]]):
    """The curves of a run: `curves[name][rank]`."""

    def __init__(self) -> None:
        super().__init__()
        self._num_curves = 0
        self.num_left_out = 0
        """Number of values that were left out because of `MAX_CURVES`."""

    def fold(self, points: Iterable[MetricPoint]) -> Mapping[tuple[str, int], list[Point]]:
        """Add the points that ranks reported. Return the new points of each curve, by name and rank."""
        news: defaultdict[tuple[str, int], list[Point]] = defaultdict(list)
        for point in points:
            rank, step = point.rank, point.step
            for name, value in point.values.items():
                news[name, rank].append((step, value, point.time))
        for name, rank in list(news):
            curve = self._find(name, rank)
            if curve is None:
                self.num_left_out += len(news.pop((name, rank)))
            else:
                curve.extend(news[name, rank])
        return news

    def _find(self, name: str, rank: int) -> Curve | None:
        """Return a curve, made if there is room for it; else None."""
        curve = self.get(name, {}).get(rank)
        if curve is None and self._num_curves < MAX_CURVES:
            self._num_curves += 1
            curve = self.setdefault(name, {}).setdefault(rank, Curve())
        return curve

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order in which they appeared."""
        return list(self)


def thin(points: list[Point], limit: int) -> list[Point]:
    """Return at most `limit` points, 4 or more: the peaks of each bucket, and one value that is not finite."""
    width = 1
    kept = points
    while len(kept) > limit:
        width = max(2 * width, 2 * len(points) // limit)
        kept = [point for start in range(0, len(points), width) for point in extremes(points[start : start + width])]
    return kept


def extremes(points: list[Point]) -> list[Point]:
    """Return the lowest, the highest and the first non-finite point, in their order."""
    values = [value for _, value, _ in points]
    # A NaN or an infinity shows in the sum. Huge numbers may overflow it; they only take the slow path.
    if math.isfinite(sum(values)):
        low, high = values.index(min(values)), values.index(max(values))
        return [points[low]] if low == high else [points[min(low, high)], points[max(low, high)]]
    finite = [at for at, value in enumerate(values) if math.isfinite(value)]
    kept = {at for at in range(len(points)) if at not in finite}
    kept = {min(kept)} if kept else kept
    if finite:
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return [points[at] for at in sorted(kept)]
