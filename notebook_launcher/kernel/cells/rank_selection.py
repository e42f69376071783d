"""Ranks as people name them: `2`, `[0, 2]`, `"0,2"`, `"1-3"`, `"all"`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from notebook_launcher.errors import ConfigError, check_rank

__all__ = ["selected_ranks"]

ITEM = re.compile(r"(\d+)(?:-(\d+))?")


def selected_ranks(ranks: object, num_processes: int) -> tuple[int, ...] | None:
    """Return the ranks in order; None if they are all ranks.

    Raises:
        ConfigError: An entry names no rank.
        NoSuchRankError: An entry is none of these ranks.
    """
    if ranks is None or ranks == "all":
        return None
    chosen = sorted(set(_numbers(ranks)))
    if not chosen:
        raise _unclear(ranks)
    for rank in chosen:
        check_rank(rank, num_processes, "session", typed=f"ranks={ranks!r}")
    return None if len(chosen) == num_processes else tuple(chosen)


def _numbers(ranks: object) -> list[int]:
    items = [ranks] if isinstance(ranks, (int, str)) else list(ranks) if isinstance(ranks, Iterable) else [None]
    numbers: list[int] = []
    for item in items:
        if isinstance(item, str):
            numbers += _numbers_in(item, ranks)
        elif isinstance(item, int) and not isinstance(item, bool):
            numbers.append(item)
        else:
            raise _unclear(ranks)
    return numbers


def _numbers_in(text: str, ranks: object) -> list[int]:
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = ITEM.fullmatch(part)
        if match is None:
            raise _unclear(ranks)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"ranks={ranks!r}: {part} is empty. Did you mean {last}-{first}?")
        numbers += range(first, last + 1)
    return numbers


def _unclear(ranks: object) -> ConfigError:
    return ConfigError(f"ranks={ranks!r} names no ranks. Write a rank (2), several ([0, 2] or '0,2'), or '1-3'.")
