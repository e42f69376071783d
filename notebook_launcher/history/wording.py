"""Metrics as people read them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["format_metrics"]

NAME_LENGTH = 40


def format_metrics(metrics: Mapping[str, float], limit: int = 4) -> str:
    """Return `loss 0.1234, accuracy 0.98`: the first of them, to four digits."""
    shown = [f"{_short(name)} {value:.4g}" for name, value in itertools.islice(metrics.items(), limit)]
    more = len(metrics) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


def _short(name: str) -> str:
    line = " ".join(name.split())
    return line if len(line) <= NAME_LENGTH else line[: NAME_LENGTH - 3] + "..."
