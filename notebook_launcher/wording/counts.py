"""Words for a number of things: plurals, and lists of ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["plural", "plural_verb", "rank_list"]


def plural(count: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def plural_verb(words: str, count: int) -> str:
    """Return words that begin with `is`, `has` or `runs` for so many subjects: `have returned` for 2 of them."""
    verb, space, rest = words.partition(" ")
    return words if count == 1 else {"is": "are", "has": "have", "runs": "run"}.get(verb, verb) + space + rest


def rank_list(ranks: Iterable[int]) -> str:
    """Return `rank 2`, `ranks 0, 2` or `ranks 0-3, 7`."""
    numbers = sorted(set(ranks))
    spans: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        span = [number for _, number in group]
        spans += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(spans)
