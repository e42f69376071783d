"""Sampled stacks of all ranks, folded into a tree of calls for each."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.drawing.flame import flame_svg
from notebook_launcher.drawing.run_picture import picture_html
from notebook_launcher.history.flames import Flame, FlameFrame
from notebook_launcher.kernel.inspection.stacks import BACKWARD, C10D, GROUP_CALLS, THREAD, parse_stacks
from notebook_launcher.wording.counts import plural
from notebook_launcher.wording.text import bounded
from notebook_launcher.wording.units import format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from notebook_launcher.kernel.inspection.stacks import StackFrame, ThreadStack

__all__ = ["Samples", "split_dumps"]

TOP = 5
"""Lines that are named for each rank."""


class Samples(tuple[Flame, ...]):
    """The ranks' time by sampled stacks; a cell shows it as a drawing, with one column for each rank.

    Each element is the tree of calls of one rank.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, texts: Mapping[int, str]) -> Samples:
        """Fold the dumps that each rank has written, one after the other."""
        return cls(_flame(rank, split_dumps(text)) for rank, text in sorted(texts.items()))

    def to_svg(self) -> str:
        """Return the drawing as an `<svg>`."""
        return flame_svg(self)

    def save(self, path: str | Path) -> None:
        """Write the drawing to a file, in which a pointer shows each function's whole name and line."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_svg())

    def __str__(self) -> str:
        return "\n".join(_describe(flame) for flame in self)

    def __repr__(self) -> str:
        return bounded(str(self), "print() shows all")

    def _repr_html_(self) -> str:
        return picture_html(self.to_svg(), str(self))


def split_dumps(text: str) -> Iterator[str]:
    """Yield each dump of a text that holds several: no thread is twice in one dump."""
    seen: set[str] = set()
    lines: list[str] = []
    for line in text.splitlines():
        if header := THREAD.match(line):
            if header["ident"] in seen:
                yield "\n".join(lines)
                lines, seen = [], set()
            seen.add(header["ident"])
        lines.append(line)
    if seen:
        yield "\n".join(lines)


def _flame(rank: int, dumps: Iterable[str]) -> Flame:
    root, num_samples = _CallTree(), 0
    for dump in dumps:
        main = parse_stacks(rank, dump).main
        if main is not None:
            num_samples += 1
            root.add(list(_path(main)))
    return Flame(rank=rank, num_samples=num_samples, frames=root.frames())


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    name: str
    place: str
    is_wait: bool
    is_library: bool


def _path(thread: ThreadStack) -> Iterator[_Key]:
    """Yield the calls from the outermost one to the innermost, or to the collective in which the rank waits."""
    # A backward computes and reduces gradients in the same C++ code, so it does not count as a wait.
    wait = None if thread.waiting_in == BACKWARD else thread.waiting_in
    for frame in reversed(thread.frames):
        if wait is not None and frame.file.endswith(C10D) and frame.function in GROUP_CALLS:
            break
        yield _key(frame)
    if wait is not None:
        yield _Key(wait, "", is_wait=True, is_library=False)


def _key(frame: StackFrame) -> _Key:
    # Libraries by function: their lines would split the drawing into slivers.
    if frame.is_library:
        return _Key(frame.function, frame.file, is_wait=False, is_library=True)
    return _Key(f"{frame.function}, line {frame.line}", frame.place, is_wait=False, is_library=False)


class _CallTree:
    def __init__(self) -> None:
        self.count = 0
        self.children: collections.defaultdict[_Key, _CallTree] = collections.defaultdict(_CallTree)

    def add(self, path: list[_Key]) -> None:
        tree = self
        for key in path:
            tree = tree.children[key]
            tree.count += 1

    def frames(self) -> tuple[FlameFrame, ...]:
        found = sorted(self.children.items(), key=lambda item: -item[1].count)
        return tuple(
            FlameFrame(
                name=key.name,
                place=key.place,
                count=tree.count,
                is_wait=key.is_wait,
                is_library=key.is_library,
                children=tree.frames(),
            )
            for key, tree in found
        )


def _describe(flame: Flame) -> str:
    """Return a rank's samples, the part of waits, and the lines of the user's code that took most of them."""
    lines: collections.Counter[str] = collections.Counter()
    for frame in flame.frames:
        _count_own(frame, lines)
    top = [f"{format_share(count / flame.num_samples)} {place}" for place, count in lines.most_common(TOP)]
    waits = f", {format_share(flame.wait_share)} of them waits for other ranks" if flame.wait_share else ""
    return "\n  ".join([f"rank {flame.rank}: {plural(flame.num_samples, 'sample')}{waits}", *top])


def _count_own(frame: FlameFrame, lines: collections.Counter[str]) -> int:
    """Count the samples of each line of the user's code, without the samples of the user's functions that it calls."""
    inner = sum(_count_own(child, lines) for child in frame.children)
    if frame.is_wait or frame.is_library:
        return inner
    lines[frame.place] += frame.count - inner
    return frame.count
