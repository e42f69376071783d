"""Scales from values to pixels, with ticks at round numbers: 1, 2 and 5 times a power of ten."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Scale", "linear_ticks", "log_ticks", "make_scale", "tick_labels"]

LARGEST = 1e300
"""Largest value; larger ones are drawn at the edge, because their differences overflow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A mapping of values in [low, high] to pixels in [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; a value beyond an end of the scale lies at that end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round numbers within the scale."""
        return log_ticks(self.low, self.high, count) if self.log else linear_ticks(self.low, self.high, count)


def make_scale(
    values: Iterable[float],
    start: float,
    end: float,
    *,
    log: bool = False,
    margin: float = 0.05,
    least_span: float = 0.0,
) -> Scale | None:
    """Return a scale over the values that can be drawn, with a margin at both ends; None if there are none.

    Args:
        values: Any numbers; what is not finite, and on a log scale what is not positive, does not count.
        start: The pixel of the lowest value, before the margin.
        end: The pixel of the highest value.
        log: True if equal factors take equal room.
        margin: As a part of the range.
        least_span: Length of a linear scale at least, as a part of its largest value.
    """
    drawable = [min(max(value, -LARGEST), LARGEST) for value in values if math.isfinite(value)]
    if log:
        drawable = [max(value, 1 / LARGEST) for value in drawable if value > 0]
    if not drawable:
        return None
    low, high = min(drawable), max(drawable)
    if log:
        room = (high / low) ** margin if high / low > 1 + 1e-9 else 2.0
        return Scale(low=max(low / room, 1 / LARGEST), high=min(high * room, LARGEST), start=start, end=end, log=True)
    if (missing := least_span * max(abs(low), abs(high)) - (high - low)) > 0 and high > low:
        low, high = low - missing / 2, high + missing / 2
    room = (high - low) * margin
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = margin and (abs(high) / 2 or 1.0)  # A constant lies in the middle.
    return Scale(low=low - room, high=high + room, start=start, end=end)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` equidistant round numbers within [low, high]."""
    raw = high / max(count, 1) - low / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 0.0
    if power == 0:  # No room, or so little that its parts are below the smallest number.
        return [low]
    spacing = power * next((factor for limit, factor in ((1.5, 1), (3.5, 2), (7.5, 5)) if raw < limit * power), 10)
    first = math.ceil(low / spacing - 1e-9)
    last = math.floor(high / spacing + 1e-9)
    # 15 digits turn 3 * 0.1 into 0.3.
    return [float(f"{number * spacing:.15g}") for number in range(first, min(last, first + 20) + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` powers of ten within [low, high]; within one decade, other round numbers."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    powers = range(first, last + 1)
    if len(powers) > count:
        spacing = math.ceil(len(powers) / count)
        return [10.0**power for power in powers if power % spacing == 0]
    if len(powers) > 2:
        return [10.0**power for power in powers]
    candidates = [factor * 10.0**power for power in range(first - 1, last + 2) for factor in (1, 2, 5)]
    inside = [value for value in candidates if low <= value <= high]
    return inside if len(inside) > 2 else linear_ticks(low, high, count)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return a text for each tick, all in one notation: `0.25`, `20k`, `1e-5`."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if len(ticks) > 1 and all(tick > 0 for tick in ticks) and largest / min(ticks) >= 100:
        return [_power(tick) for tick in ticks]
    spacing = min((abs(b - a) for a, b in itertools.pairwise(ticks)), default=largest) or 1.0
    if largest >= 1e15 or largest < 1e-3:
        digits = next((d for d in range(9) if all(abs(float(f"{t:.{d}e}") - t) < 1e-4 * spacing for t in ticks)), 9)
        return [_exponent(f"{tick:.{digits}e}") for tick in ticks]
    unit, letter = next(
        ((unit, letter) for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 10 * unit),
        (1.0, ""),
    )
    close = 1e-4 * spacing / unit
    decimals = next((d for d in range(9) if all(abs(round(tick / unit, d) - tick / unit) < close for tick in ticks)), 9)
    return ["0" if tick == 0 else f"{tick / unit:.{decimals}f}{letter}" for tick in ticks]


def _power(tick: float) -> str:
    return f"{tick:g}" if 1e-3 <= tick < 1e4 else _exponent(f"{tick:.0e}")


def _exponent(text: str) -> str:
    """Return `1e-5` for Python's `1e-05`, and 0 for `0e+00`."""
    mantissa, _, exponent = text.partition("e")
    return "0" if float(mantissa) == 0 else f"{mantissa}e{int(exponent)}"
