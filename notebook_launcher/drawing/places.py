"""Places on the horizontal axis of a plot as words: steps, times and epochs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from notebook_launcher.drawing.scales import tick_labels
from notebook_launcher.wording.units import format_number, format_seconds

if TYPE_CHECKING:
    from notebook_launcher.drawing.charts import AxisKind
    from notebook_launcher.drawing.scales import Scale

__all__ = ["name_place", "place_ticks"]

SPACINGS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
"""Seconds between two ticks of a time axis that spans minutes or more."""


def name_place(axis: AxisKind, place: float) -> str:
    """Return `step 1,200`, `4.2 s` or `epoch 1.5`."""
    if axis == "time":
        return format_seconds(place)
    return f"step {place:,.0f}" if axis == "step" else f"epoch {format_number(place)}"


def place_ticks(axis: AxisKind, x: Scale) -> list[tuple[float, str]]:
    """Return the places of the ticks with their labels; there is no step between two steps."""
    count = max(2, int((x.end - x.start) / 60))
    if axis == "time":
        ticks = _time_ticks(x, count)
        return [(tick, _clock(tick)) for tick in ticks]
    ticks = x.ticks(count)
    if axis == "step":
        ticks = [tick for tick in ticks if float(tick).is_integer()] or [math.floor(x.low)]
    return list(zip(ticks, tick_labels(ticks), strict=True))


def _time_ticks(x: Scale, count: int) -> list[float]:
    span = x.high - x.low
    spacing = next((spacing for spacing in SPACINGS if spacing * count >= span), SPACINGS[-1])
    if span < SPACINGS[0] * 2:
        return x.ticks(count)
    spacing *= math.ceil(span / (spacing * count))
    return [spacing * at for at in range(math.ceil(x.low / spacing), math.floor(x.high / spacing) + 1)]


def _clock(seconds: float) -> str:
    return format_seconds(seconds).removesuffix(" 00 s").removesuffix(" 00 min")
