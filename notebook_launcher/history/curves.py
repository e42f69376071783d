"""Metrics as curves of bounded size: a run of any length takes a fixed amount of memory and ink."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_launcher.history.schema import MetricPoint

__all__ = ["MAX_CURVES", "MAX_POINTS", "Curve", "Curves", "thin"]

MAX_POINTS = 2000
"""Points of a curve: more than a plot has pixels."""
MAX_CURVES = 1024
"""Curves of a run, one for each metric and rank; metrics that come later are counted and left out."""


class Curve:
    """Values by step, thinned out as they grow so that every peak stays.

    Of each `stride` points the lowest and the highest are kept, and one that is not finite, if there is one.
    """

    def __init__(self) -> None:
        self.stride = 1
        self.count = 0
        """How many points there were."""
        self._points: list[tuple[int, float]] = []
        self._pending: list[tuple[int, float]] = []

    def extend(self, points: Sequence[tuple[int, float]]) -> None:
        """Add points, each a step and a value, in the order of arrival."""
        self.count += len(points)
        self._pending += points
        while len(self._pending) >= self.stride:
            self._put_away()

    def _put_away(self) -> None:
        # Up to the point at which a curve of single points would be thinned, so that batches change nothing.
        room, stride = MAX_POINTS + 1 - len(self._points), self.stride
        if stride == 1:
            taken = room
            self._points += self._pending[:taken]
        else:
            taken = 0
            while len(self._points) <= MAX_POINTS and taken + stride <= len(self._pending):
                self._points += _extremes(self._pending[taken : taken + stride])
                taken += stride
        del self._pending[:taken]
        if len(self._points) > MAX_POINTS:
            self._thin()

    def _thin(self) -> None:
        # Two points stand for a bucket, so four of them for one of twice the size.
        width = 4
        points, self._points = self._points, []
        for start in range(0, len(points), width):
            self._points += _extremes(points[start : start + width])
        self.stride = width if self.stride == 1 else 2 * self.stride

    def points(self) -> list[tuple[int, float]]:
        """Return (step, value) in the order of arrival, the newest included: at most `MAX_POINTS` and a few."""
        if not self._pending:
            return list(self._points)
        kept = self._points + _extremes(self._pending)
        return kept if kept[-1] is self._pending[-1] else [*kept, self._pending[-1]]


class Curves:
    """The curves of a run: `curves[name][rank]`."""

    def __init__(self) -> None:
        self._curves: dict[str, dict[int, Curve]] = {}
        self._num_curves = 0
        self.num_left_out = 0
        """Values that belong to metrics beyond `MAX_CURVES`."""

    def fold(self, points: Iterable[MetricPoint]) -> Mapping[tuple[str, int], list[tuple[int, float]]]:
        """Take in what ranks reported; return the new points of each curve, by name and rank."""
        news: defaultdict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        for point in points:
            rank, step = point.rank, point.step
            for name, value in point.values.items():
                news[name, rank].append((step, value))
        for name, rank in list(news):
            curve = self._find(name, rank)
            if curve is None:
                self.num_left_out += len(news.pop((name, rank)))
            else:
                curve.extend(news[name, rank])
        return news

    def _find(self, name: str, rank: int) -> Curve | None:
        """Return a curve, a new one if there is room for it."""
        curve = self._curves.get(name, {}).get(rank)
        if curve is None and self._num_curves < MAX_CURVES:
            self._num_curves += 1
            curve = self._curves.setdefault(name, {}).setdefault(rank, Curve())
        return curve

    def __getitem__(self, name: str) -> dict[int, Curve]:
        return self._curves[name]

    def __contains__(self, name: object) -> bool:
        return name in self._curves

    def __len__(self) -> int:
        return len(self._curves)

    @property
    def names(self) -> list[str]:
        """The metrics, in the order in which they appeared."""
        return list(self._curves)


def thin(points: list[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """Return at most `limit` of the points, 4 or more: the peaks of each stretch, and one value that is not finite."""
    width = 1
    kept = points
    while len(kept) > limit:
        width = max(2 * width, 2 * len(points) // limit)
        kept = [point for start in range(0, len(points), width) for point in _extremes(points[start : start + width])]
    return kept


def _extremes(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the lowest and the highest point, and the first that is not finite, in their order."""
    values = [value for _, value in points]
    if math.isfinite(sum(values)):  # A NaN or an infinity would be in it; huge numbers only take the longer way.
        low, high = values.index(min(values)), values.index(max(values))
        return [points[low]] if low == high else [points[min(low, high)], points[max(low, high)]]
    finite = [at for at, (_, value) in enumerate(points) if math.isfinite(value)]
    kept = {at for at in range(len(points)) if at not in finite}
    kept = {min(kept)} if kept else kept
    if finite:
        kept |= {min(finite, key=lambda at: points[at][1]), max(finite, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]
