"""The source lines of the cells that ran on this rank, for as long as code of theirs lives."""

from __future__ import annotations

import linecache
import types
import weakref
from typing import TYPE_CHECKING

from notebook_launcher.travel import cells

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CellSources"]


class CellSources:
    """Keeps lines in `linecache` for tracebacks, `inspect.getsource` and `torch.compile`, and drops them afterwards."""

    def __init__(self) -> None:
        self._codes: dict[str, list[weakref.ref[types.CodeType]]] = {}
        """By file name: the code that was compiled from the cell."""

    def add(self, filename: str, place: str, lines: list[str]) -> None:
        """Install the lines of a cell that is about to run, and drop the lines of cells of which nothing is left."""
        for name in [name for name, codes in self._codes.items() if all(code() is None for code in codes)]:
            del self._codes[name]
            linecache.cache.pop(name, None)
        cells.keep_lines({filename: (place, lines)})
        self._codes[filename] = []

    def follow(self, filename: str, code: types.CodeType) -> None:
        """Keep the lines of a cell while this code lives, or a function that was compiled with it."""
        self._codes[filename] += map(weakref.ref, _with_inner(code))


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _with_inner(const)
