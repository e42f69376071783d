"""Curves as text, for front ends without pictures: `█▆▅▃▂▁`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["spark_line"]

BLOCKS = "▁▂▃▄▅▆▇█"


def spark_line(points: Sequence[tuple[float, float]], width: int = 24) -> str:
    """Return a curve in at most `width` characters: each is the mean of an interval, a cross if it is not finite."""
    if not points:
        return ""
    num = min(width, len(points))
    stretches = [points[at * len(points) // num : (at + 1) * len(points) // num] for at in range(num)]
    means = [sum(value / len(stretch) for _, value in stretch) for stretch in stretches]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    # By halves: the difference of two large values of different sign overflows.
    room = high / 2 - low / 2
    return "".join(
        BLOCKS[int(7.999 * ((mean / 2 - low / 2) / room if room > 0 else 0.45))] if math.isfinite(mean) else "×"  # noqa: RUF001
        for mean in means
    )
