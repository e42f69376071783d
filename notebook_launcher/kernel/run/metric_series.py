"""The metrics that ranks have reported, packed: a million points take 50 MB, and as objects 420."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

from notebook_launcher.history.schema import MetricPoint

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
        """Return the points after a position, as far as they are kept, and the next position; the first is 0."""
        chunks, newest, num_dropped = self._kept
        first, skip = divmod(max(0, position - num_dropped), CHUNK)
        packed, latest = chunks[first:], newest[:]
        end = num_dropped + len(chunks) * CHUNK + len(latest)
        return (_Points(packed, latest, skip) if packed else latest[skip:]), end


class _Points(Sequence[MetricPoint]):
    """Points that are unpacked as they are read, so that a reader of them all needs no memory for them all.

    Args:
        chunks: The chunks.
        newest: Points after them.
        skip: Number of points of the first chunk that are left out.
    """

    def __init__(self, chunks: Sequence[_Chunk | list[MetricPoint]], newest: list[MetricPoint], skip: int) -> None:
        self._chunks, self._newest, self._skip = chunks, newest, skip

    def __len__(self) -> int:
        return len(self._chunks) * CHUNK + len(self._newest) - self._skip

    def __iter__(self) -> Iterator[MetricPoint]:
        parts = itertools.chain(map(_unpacked, self._chunks), (self._newest,))
        return itertools.islice(itertools.chain.from_iterable(parts), self._skip, None)

    @overload
    def __getitem__(self, at: int) -> MetricPoint: ...
    @overload
    def __getitem__(self, at: slice) -> list[MetricPoint]: ...
    def __getitem__(self, at: int | slice) -> MetricPoint | list[MetricPoint]:
        if isinstance(at, slice):
            return list(self)[at]
        chunk, place = divmod(range(len(self))[at] + self._skip, CHUNK)
        return self._newest[place] if chunk == len(self._chunks) else _unpacked(self._chunks[chunk])[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment] # as of a list

    def __reduce__(self) -> tuple[type[list[MetricPoint]], tuple[list[MetricPoint]]]:
        return list, (list(self),)


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
