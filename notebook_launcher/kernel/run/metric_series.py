"""The metrics that ranks have reported, packed: a million points take 50 MB, and as objects 420."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from notebook_launcher.history.schema import MetricPoint

__all__ = ["MetricSeries"]

CHUNK = 4096
"""Points that are packed together. The newest ones, up to this number, stay objects."""


class _Chunk(NamedTuple):
    """Points in columns, an element for each of them."""

    ranks: array[int]
    steps: array[int]
    times: array[float]
    names: tuple[tuple[str, ...], ...]
    """All different sets of names."""
    named: array[int]
    """The places of the points' sets in `names`."""
    values: array[float]
    """The values of all points, one after the other."""


class MetricSeries:
    """Points in the order in which they came; beyond a limit the oldest tenth is dropped.

    One thread appends, any thread reads.

    Args:
        limit: The greatest number of points that are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: tuple[tuple[_Chunk | list[MetricPoint], ...], list[MetricPoint], int] = (), [], 0
        """The chunks, each of `CHUNK` points, the newest points, and the number of dropped ones; one tuple, so that
        readers get all of one moment."""

    def append(self, point: MetricPoint) -> None:
        """Add a point."""
        chunks, newest, num_dropped = self._kept
        newest.append(point)
        if len(newest) < CHUNK:
            return
        chunks = (*chunks, _packed(newest))
        if len(chunks) * CHUNK > self._limit:
            num_chunks = max(1, len(chunks) // 10)
            chunks, num_dropped = chunks[num_chunks:], num_dropped + num_chunks * CHUNK
        self._kept = chunks, [], num_dropped

    def since(self, position: int) -> tuple[list[MetricPoint], int]:
        """Return the points after a position, as far as they are kept, and the next position; the first is 0."""
        chunks, newest, num_dropped = self._kept
        first, skip = divmod(max(0, position - num_dropped), CHUNK)
        points: list[MetricPoint] = []
        for chunk in chunks[first:]:
            points += _unpacked(chunk)
        points += newest
        end = num_dropped + first * CHUNK + len(points)
        return points[skip:], end


def _packed(points: list[MetricPoint]) -> _Chunk | list[MetricPoint]:
    """Return the points in columns; as they are, if a number does not fit."""
    names: dict[tuple[str, ...], int] = {}
    try:
        return _Chunk(
            ranks=array("i", [point.rank for point in points]),
            steps=array("q", [point.step for point in points]),
            times=array("d", [point.time for point in points]),
            named=array("i", [names.setdefault(tuple(point.values), len(names)) for point in points]),
            names=tuple(names),
            values=array("d", [value for point in points for value in point.values.values()]),
        )
    except OverflowError:
        return points


def _unpacked(chunk: _Chunk | list[MetricPoint]) -> list[MetricPoint]:
    if isinstance(chunk, list):
        return chunk
    values = iter(chunk.values)
    return [
        # Names come first in `zip`: what it takes from `values` for a name that is not there would be lost.
        MetricPoint(rank=rank, step=step, time=time, values=dict(zip(chunk.names[named], values)))  # noqa: B905
        for rank, step, time, named in zip(chunk.ranks, chunk.steps, chunk.times, chunk.named, strict=True)
    ]
