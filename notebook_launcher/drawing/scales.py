"""Scales from values to pixels, with ticks at round numbers: 1, 2 and 5 times a power of ten."""

from __future__ import annotations

import dataclasses
import itertools
import math
import unicodedata
from typing import TYPE_CHECKING

from notebook_launcher.colours import INK, LineStyle
from notebook_launcher.wording import escape, format_number, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from notebook_launcher.drawing.charts import AxisKind


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
        return [f"{tick:g}" if 1e-3 <= tick < 1e4 else _exponent(f"{tick:.0e}") for tick in ticks]
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


def _exponent(text: str) -> str:
    """Return `1e-5` for Python's `1e-05`, and 0 for `0e+00`."""
    mantissa, _, exponent = text.partition("e")
    return "0" if float(mantissa) == 0 else f"{mantissa}e{int(exponent)}"


# --------------------------------------------------------------------------------------------------------------------
# Elements of SVG that pictures consist of.


SIZE, SMALL = 12.0, 11.0
"""Font sizes in pixels: of titles, and of all other text."""
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',sans-serif"


@dataclasses.dataclass(frozen=True, slots=True)
class SvgPicture:
    """A part of a page: SVG elements that fill [0, width] x [0, height], in pixels."""

    width: float
    height: float
    body: str


def stack(pictures: Iterable[SvgPicture], *, gap: float = 18.0) -> SvgPicture:
    """Return one picture with the given ones below each other."""
    parts: list[str] = []
    top = width = 0.0
    for picture in pictures:
        top += gap if parts else 0.0
        parts.append(f'<g transform="translate(0 {pixels(top)})">{picture.body}</g>')
        top, width = top + picture.height, max(width, picture.width)
    return SvgPicture(width, top, "".join(parts))


def document(picture: SvgPicture, title: str) -> str:
    """Return a whole `<svg>`, which shrinks with the page and is also valid as a file."""
    width, height = pixels(picture.width), pixels(picture.height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}" color="{INK}" fill="none" font-family="{FONT}" '
        f'font-size="{pixels(SMALL)}" style="max-width:100%;height:auto">'
        f"<title>{escape(title)}</title>{picture.body}</svg>"
    )


def pixels(value: float) -> str:
    """Return a coordinate, rounded to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    bold: bool = False,
    size: float = SMALL,
    width: float | None = None,
    fill: str = "currentColor",
) -> str:
    """Return one line of text on the base line `y`; text wider than `width` is cut, with a tooltip for the whole."""
    shown = words if width is None else shorten(words, width, size * (1.06 if bold else 1.0))
    title = f"<title>{escape(words)}</title>" if shown != words else ""
    attributes = "" if anchor == "start" else f' text-anchor="{anchor}"'
    attributes += ' font-weight="600"' if bold else ""
    attributes += "" if size == SMALL else f' font-size="{pixels(size)}"'
    return f'<text x="{pixels(x)}" y="{pixels(y)}" fill="{fill}"{attributes}>{title}{escape(shown)}</text>'


_MARKERS: dict[str, tuple[float, float, str, tuple[float, ...]]] = {
    "circle": (-1.0, 0.0, "a{0} {0} 0 1 0 {1} 0a{0} {0} 0 1 0 -{1} 0z", (1.0, 2.0)),
    "square": (-0.9, -0.9, "h{0}v{0}h-{0}z", (1.8,)),
    "triangle": (0.0, -1.25, "l{0} {1}h-{2}z", (1.2, 2.1, 2.4)),
    "diamond": (0.0, -1.35, "l{0} {0}l-{0} {0}l-{0} -{0}z", (1.35,)),
    "cross": (-0.9, -0.9, "l{0} {0}m0 -{0}l-{0} {0}", (1.8,)),
    "bar": (0.0, -1.3, "v{0}", (2.6,)),
}
"""The path of each marker: where it begins beside its place, its commands, and the lengths in them, in radii."""


def marker(style: LineStyle, at: Sequence[tuple[float, float]], radius: float = 3.2) -> str:
    """Return a line's marker at each of the places, as one path."""
    right, down, commands, lengths = _MARKERS[style.marker]
    drawn = commands.format(*(pixels(length * radius) for length in lengths))
    path = "".join(f"M{pixels(x + right * radius)} {pixels(y + down * radius)}{drawn}" for x, y in at)
    stroke = f' stroke="{style.colour}" stroke-width="2"' if style.marker in ("cross", "bar") else ""
    return f'<path d="{path}" fill="{style.colour}"{stroke}/>' if at else ""


# --------------------------------------------------------------------------------------------------------------------
# Estimated widths of texts, because a picture is drawn without knowing the fonts of the page that shows it.


_NARROW = frozenset("iIjl.,:;'|![]()/ ftr·")
_WIDE = frozenset("mwMW%@")


def shorten(text: str, width: float, size: float) -> str:
    """Return the text, cut with an ellipsis if it is wider than `width` pixels at this font size."""
    if text_width(text, size) <= width:
        return text
    room = width - size
    for at, character in enumerate(text):
        room -= text_width(character, size)
        if room < 0:
            return text[:at].rstrip() + "…"
    return text


def text_width(text: str, size: float) -> float:
    """Return the approximate width of a text in pixels, in DejaVu Sans, the widest font that a page may choose."""
    return size * sum(_ems(character) for character in text)


def _ems(character: str) -> float:
    if character in _NARROW:
        return 0.4
    if character in _WIDE:
        return 0.98
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.1
    return 0.7 if character.isupper() else 0.64


# --------------------------------------------------------------------------------------------------------------------
# Places on the horizontal axis of a plot as words: steps, times and epochs.


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
