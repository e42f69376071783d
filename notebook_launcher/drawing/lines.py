"""Lines of a plot: broken at values that cannot be drawn, and thinned to the pixels of the plot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from notebook_launcher.colours import line_style
from notebook_launcher.drawing.svg import marker, pixels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from notebook_launcher.drawing.averages import Series
    from notebook_launcher.drawing.scales import Scale

__all__ = ["draw_series", "oddities"]

Pixel = tuple[float, float]

FEW = 16
"""Largest number of points of a line that marks each point."""
NUM_MARKERS = 5
"""Markers along a line with more points."""
NEAR = 8.0
"""Pixels within which two marks of values that are not finite become one."""


def draw_series(
    series: Series,
    shown: Sequence[tuple[float, float]],
    x: Scale,
    y: Scale,
    columns: int,
    *,
    place: int = 0,
    num: int = 1,
) -> str:
    """Return a line, with its band and its raw points behind it.

    Args:
        series: The raw points and the band.
        shown: The points of the line itself, which may be smoothed.
        x: Scale of the steps.
        y: Scale of the values.
        columns: Number of columns of the plot; the lowest and the highest point of each are drawn.
        place: Number of the line in its plot, from 0.
        num: Number of lines in the picture; a single line needs no markers.
    """
    style = line_style(series.style)
    drawn = [_thin(segment, x, columns) for segment in _segments(shown, x, y)]
    body = _band_path(series.band, x, y, columns, style.colour)
    line = f'fill="none" stroke="{style.colour}" stroke-linejoin="round" stroke-linecap="round"'
    if shown is not series.points:
        raw = [_thin(segment, x, columns) for segment in _segments(series.points, x, y)]
        body += f'<path d="{_path(raw)}" {line} stroke-width="1" stroke-opacity="0.35"/>'
    dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
    body += f'<path d="{_path(drawn)}" {line} stroke-width="1.6"{dash}/>' if drawn else ""
    pixels = [pixel for segment in drawn for pixel in segment]
    lone = [segment[0] for segment in drawn if len(segment) == 1]  # A single point makes no line.
    return body + marker(style, lone + _marked(pixels, place, num), 2.6)


def _segments(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> list[list[Pixel]]:
    """Return unbroken lines; a line ends at a value that cannot be drawn, and where the steps start again."""
    segments: list[list[Pixel]] = [[]]
    last = -math.inf
    for step, value in points:
        drawable = math.isfinite(value) and (value > 0 or not y.log)
        if not drawable or step < last:
            segments.append([])
        if drawable:
            segments[-1].append((x(step), y(value)))
        last = step
    return [segment for segment in segments if segment]


def _thin(segment: Sequence[Pixel], x: Scale, columns: int) -> list[Pixel]:
    """Return the highest and the lowest point of each column of pixels, and both ends of the line."""
    if len(segment) <= columns:
        return list(segment)
    width = max((x.end - x.start) / columns, 1e-9)
    kept: list[Pixel] = [segment[0]]
    column: list[Pixel] = []
    for pixel in segment:
        if column and int(pixel[0] / width) != int(column[0][0] / width):
            kept += _extremes(column)
            column = []
        column.append(pixel)
    return [*kept, *_extremes(column), segment[-1]]


def _extremes(column: Sequence[Pixel]) -> list[Pixel]:
    low, high = min(column, key=lambda pixel: pixel[1]), max(column, key=lambda pixel: pixel[1])
    return [low] if low == high else sorted((low, high), key=column.index)


def _path(segments: Iterable[Sequence[Pixel]]) -> str:
    parts = []
    for segment in segments:
        coordinates = " ".join(f"{pixels(x)} {pixels(y)}" for x, y in segment)
        parts.append(f"M{coordinates}" if len(segment) > 1 else f"M{coordinates}h0")
    return "".join(parts)


def _marked(pixels: Sequence[Pixel], place: int, num: int) -> list[Pixel]:
    """Return the places of a line's markers; the markers of lines that lie on each other stand side by side."""
    if len(pixels) <= FEW:
        return list(pixels[min(place, len(pixels) - 1) % num :: num]) if pixels else []
    if num == 1:
        return []
    return [pixels[int((at + place / num) / NUM_MARKERS * len(pixels))] for at in range(NUM_MARKERS)]


def _band_path(band: Sequence[tuple[float, float, float]], x: Scale, y: Scale, columns: int, colour: str) -> str:
    """Return the range around a line as one shape; empty if there is none."""
    drawable = [(step, low, high) for step, low, high in band if not y.log or low > 0]
    if len(drawable) < 2:
        return ""
    stride = max(1, math.ceil(len(drawable) / columns))
    stretches = [drawable[at : at + stride] for at in range(0, len(drawable), stride)]
    tops = [(x(stretch[0][0]), y(max(high for _, _, high in stretch))) for stretch in stretches]
    lows = [(x(stretch[0][0]), y(min(low for _, low, _ in stretch))) for stretch in stretches]
    return f'<path d="{_path([[*tops, *reversed(lows)]])}z" fill="{colour}" fill-opacity="0.18"/>'


def oddities(every: Iterable[Series], x: Scale, y: Scale, name: Callable[[float], str]) -> tuple[str, str]:
    """Return marks where a value could not be drawn, and a note with the kinds and the first place, as `name` names it.

    NaN is a cross at the bottom, an infinite value a triangle at its edge.
    """
    marks: list[str] = []
    first: dict[str, float] = {}
    for series in every:
        colour = line_style(series.style).colour
        last = dict.fromkeys((NAN, HIGH, LOW), -math.inf)
        for step, value in series.points:
            sign = _sign(value, y)
            if not sign:
                continue
            first[sign] = min(first.get(sign, step), step)
            if sign in last and x(step) - last[sign] > NEAR:
                last[sign] = x(step)
                marks.append(_mark(sign, x(step), y, colour))
    since = f" from {name(min(first.values()))}" if first else ""
    return "".join(marks), ", ".join(first) + since


NAN, HIGH, LOW = "× NaN", "▲ ∞", "▼ -∞"  # noqa: RUF001 - the sign that is drawn
"""Marks of values that cannot be drawn: the sign, and the value in words."""


def _sign(value: float, y: Scale) -> str:
    if math.isnan(value):
        return NAN
    if math.isinf(value):
        return HIGH if value > 0 else LOW
    return "≤ 0 left out" if y.log and value <= 0 else ""


def _mark(sign: str, x: float, y: Scale, colour: str) -> str:
    bottom, top = pixels(y.start - 8), pixels(y.end + 2)
    if sign == NAN:
        shape = f'd="M{pixels(x - 3)} {bottom}l6 6m0 -6l-6 6" stroke="{colour}" stroke-width="1.6"'
    elif sign == HIGH:
        shape = f'd="M{pixels(x)} {top}l4 7h-8z" fill="{colour}"'
    else:
        shape = f'd="M{pixels(x)} {pixels(y.start - 2)}l4 -7h-8z" fill="{colour}"'
    return f'<path class="nonfinite" {shape}><title>{sign}</title></path>'
