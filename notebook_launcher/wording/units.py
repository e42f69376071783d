"""Durations, sizes, shares, rates and numbers as people read them.

A run reads alike in the cell, in its picture and on its page, which gets words. Half is rounded up, as JavaScript does,
which writes the numbers below the pointer. Between a number and its unit stands an ordinary space: what is shown can be
copied, searched for and printed anywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import TYPE_CHECKING

from notebook_launcher.wording.counts import plural
from notebook_launcher.wording.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FORMATS",
    "Formats",
    "describe_values",
    "format_bytes",
    "format_count",
    "format_elapsed",
    "format_metrics",
    "format_number",
    "format_rate",
    "format_seconds",
    "format_setting",
    "format_share",
]

MINUTE, HOUR = 60, 3600
NAME_LENGTH = 40
"""Characters of a metric's name in a line of metrics."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Units, digits and words of the functions in this module."""

    durations: tuple[tuple[float, str, int], ...] = ((1e6, "µs", 1000), (1e3, "ms", 1000), (1, "s", MINUTE))
    """Each the number of its units in a second, its name, and the number of them from which the next unit is used."""
    sizes: tuple[tuple[float, str], ...] = ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))
    """Each the number of bytes in its unit, and the unit's name."""
    unit_digits: int = 3
    """Significant digits of a number with a unit."""
    digits: int = 4
    """Significant digits of a number without a unit."""
    plain_range: tuple[float, float] = (1e-3, 1e6)
    """Sizes of a number from which and up to which it is written without an exponent."""
    not_a_number: str = "NaN"
    infinity: str = "∞"
    not_finite: str = "not finite"
    """On the page, where the three kinds cannot be distinguished, because JSON has no word for any."""


FORMATS = Formats()


def format_seconds(seconds: float | None) -> str:
    """Return `490 µs`, `35 ms`, `4.2 s`, `3 min 20 s` or `1 h 02 min`; empty if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if 0 < seconds < 1e-6:
        return "<1 µs"
    for factor, unit, limit in FORMATS.durations:
        rounded = _round(seconds * factor, FORMATS.unit_digits)
        if rounded < limit and (seconds or unit == "s"):
            return f"{rounded:g} {unit}"
    whole = math.floor(seconds + 0.5)
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02d} s"
    minutes = math.floor(seconds / MINUTE + 0.5)
    return f"{minutes // MINUTE:,} h {minutes % MINUTE:02d} min"


def format_elapsed(seconds: float) -> str:
    """Return a duration that is still growing: as `format_seconds`, but from 10 s on in whole seconds."""
    return format_seconds(math.floor(seconds) if seconds >= 10 else seconds)


def format_bytes(number: float | None) -> str:
    """Return `12 bytes`, `1.5 kB` or `3.12 GB`: in powers of 1000, as torch and disks count; empty if unknown."""
    if number is None or not math.isfinite(number):
        return ""
    if number < 0:
        return f"-{format_bytes(-number)}"
    whole = math.floor(number + 0.5)
    if whole < 1000:
        return plural(whole, "byte")
    *smaller, (largest, name) = FORMATS.sizes
    for size, unit in smaller:
        rounded = _round(number / size, FORMATS.unit_digits)
        if rounded < 1000:
            return f"{rounded:g} {unit}"
    return f"{format_number(number / largest, FORMATS.unit_digits)} {name}"


def format_share(share: float | None) -> str:
    """Return a part of 1 as `52.8 %`, to one decimal; only nothing is `0 %`, and only all of it `100 %`."""
    if share is None or not math.isfinite(share):
        return ""
    if 0 < share < 0.0005:
        return "<0.1 %"
    if 0.9995 <= share < 1:
        return ">99.9 %"
    percent = math.floor(share * 1000 + 0.5) / 10
    return f"{percent:.1f}".removesuffix(".0") + " %"


def format_rate(per_second: float | None) -> str:
    """Return `12.5 it/s`, or `1.6 s/it` where one iteration takes longer than a second; empty if unknown."""
    if per_second is None or not math.isfinite(per_second) or per_second <= 0:
        return ""
    if per_second >= 1:
        return f"{format_number(per_second, FORMATS.unit_digits)} it/s"
    return f"{format_seconds(1 / per_second)}/it"


def format_count(number: float | None) -> str:
    """Return a whole number in full: `1,234,567`; empty if unknown."""
    return "" if number is None or not math.isfinite(number) else f"{math.floor(number + 0.5):,}"


def format_number(value: float | None, digits: int = FORMATS.digits) -> str:
    """Return `0.1234`, `12.35`, `1,235`, `1.235e-5`, `NaN` or `∞`; empty if unknown.

    Args:
        value: Any number.
        digits: Number of digits shown; the whole part of a number below a million is shown in full.
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return FORMATS.not_a_number if math.isnan(value) else f"{'-' * (value < 0)}{FORMATS.infinity}"
    if value == 0:
        return "0"
    size = abs(value)
    smallest, largest = FORMATS.plain_range
    if not smallest <= size < largest:
        mantissa, _, exponent = f"{_decimal(value, digits):e}".partition("e")
        return f"{_without_zeros(mantissa)}e{int(exponent)}"
    if size >= 10 ** (digits - 1):
        return f"{Decimal(float(value)).quantize(Decimal(1), ROUND_HALF_UP):,}"
    return _without_zeros(f"{_decimal(value, digits):f}")


def format_metrics(metrics: Mapping[str, float], limit: int = 4) -> str:
    """Return `loss 0.1234, accuracy 0.98, 3 more`: the first of them, to four digits."""
    shown = [
        f"{one_line(name, NAME_LENGTH)} {format_number(value)}"
        for name, value in itertools.islice(metrics.items(), limit)
    ]
    more = len(metrics) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


def format_setting(value: float | None) -> str:
    """Return a setting's value as people read it: a number, `on`, `off`, or `none`."""
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else format_number(value)


def describe_values(name: str, before: float | None, after: float | None) -> str:
    """Return `lr 0.1 → 0.05`."""
    return f"{name} {format_setting(before)} → {format_setting(after)}"


def _decimal(value: float, digits: int) -> Decimal:
    """Return the value with this many significant digits. Not `f"{value:.4g}"`, which rounds 0.5 to even."""
    return Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal_from_float(float(value))


def _round(value: float, digits: int) -> float:
    return float(_decimal(value, digits))


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
