"""Metrics as people read them, in one line."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from notebook_launcher.drawing.text import one_line
from notebook_launcher.units import format_number

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["format_metrics"]

NAME_LENGTH = 40


def format_metrics(metrics: Mapping[str, float], limit: int = 4) -> str:
    """Return `loss 0.1234, accuracy 0.98, 3 more`: the first of them, to four digits."""
    shown = [
        f"{one_line(name, NAME_LENGTH)} {format_number(value)}"
        for name, value in itertools.islice(metrics.items(), limit)
    ]
    more = len(metrics) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])
