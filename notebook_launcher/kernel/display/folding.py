"""Merges the lines of several ranks into one text: each line with its rank, equal lines of several ranks once."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import operator
from typing import TYPE_CHECKING

from notebook_launcher.wording.counts import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from notebook_launcher.engines.events import Stream
    from notebook_launcher.kernel.display.text_block import TextBlock

__all__ = ["fold", "label"]


def label(ranks: Iterable[int], nodes: Sequence[str] = ()) -> str:
    """Return the label of a line that these ranks wrote: `[ranks 0,2] `, or `[ranks 0,1 on gpu1] `.

    Args:
        ranks: The ranks.
        nodes: By rank: the name of its machine; empty if there is one.
    """
    ranks = tuple(ranks)
    names = {nodes[rank] for rank in ranks} if nodes else set()
    place = f" on {names.pop()}" if len(names) == 1 else ""
    return f"[{rank_list(ranks).replace(', ', ',')}{place}] "


def fold(blocks: Iterable[TextBlock], *, labelled: bool, nodes: Sequence[str] = ()) -> Iterator[tuple[Stream, str]]:
    """Yield the text with its labels, in the order of arrival as far as merging equal lines allows.

    The order of each rank's own lines never changes. Lines of a single rank, and text without labels, are not split
    into lines.
    """
    blocks = list(blocks)
    if labelled and len({block.rank for block in blocks} - {None}) > 1:
        yield from _fold_lines(blocks, nodes)
        return
    for block in blocks:
        if labelled and block.rank is not None:
            prefix = label([block.rank], nodes)
            yield block.stream, prefix + block.text[:-1].replace("\n", "\n" + prefix) + "\n"
        else:
            yield block.stream, block.text


@dataclasses.dataclass(slots=True)
class _Line:
    order: int
    stream: Stream
    text: str
    ranks: tuple[int, ...]


def _fold_lines(blocks: Iterable[TextBlock], nodes: Sequence[str]) -> Iterator[tuple[Stream, str]]:
    per_rank: dict[int | None, list[_Line]] = collections.defaultdict(list)
    for order, block in enumerate(blocks):
        ranks = () if block.rank is None else (block.rank,)
        per_rank[block.rank] += [_Line(order, block.stream, text, ranks) for text in block.text[:-1].split("\n")]
    merged: list[_Line] = []
    for lines in per_rank.values():
        merged = _merge(merged, lines)
    labels = {ranks: label(ranks, nodes) if ranks else "" for ranks in {line.ranks for line in merged}}
    for line in merged:
        yield line.stream, f"{labels[line.ranks]}{line.text}\n"


def _merge(merged: list[_Line], lines: list[_Line]) -> list[_Line]:
    """Add the lines of one more rank: each to an equal line that is there already, otherwise between its neighbours."""
    places: dict[tuple[Stream, str], list[int]] = collections.defaultdict(list)
    for place, line in enumerate(merged):
        if line.ranks:
            places[line.stream, line.text].append(place)
    result: list[_Line] = []
    unmatched: list[_Line] = []
    start = 0
    for line in lines:
        candidates = places.get((line.stream, line.text), ()) if line.ranks else ()
        found = bisect.bisect_left(candidates, start)
        # An empty line equals every other empty line: matching one far ahead would separate lines that belong together.
        if found == len(candidates) or not (line.text or candidates[found] == start):
            unmatched.append(line)
            continue
        result += _by_arrival(merged[start : candidates[found]], unmatched)
        same = merged[candidates[found]]
        same.ranks += line.ranks
        result.append(same)
        start = candidates[found] + 1
        unmatched = []
    return result + _by_arrival(merged[start:], unmatched)


def _by_arrival(first: list[_Line], second: list[_Line]) -> list[_Line]:
    return list(heapq.merge(first, second, key=operator.attrgetter("order"))) if second else first
