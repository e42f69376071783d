"""Lines of a plot: broken at values that cannot be drawn, and thinned to the pixels of the plot."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from notebook_launcher.colours import line_style
from notebook_launcher.drawing.charts import by_step
from notebook_launcher.drawing.scales import marker, pixels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from notebook_launcher.drawing.charts import Places
    from notebook_launcher.drawing.scales import Scale
    from notebook_launcher.history.curves import Curve


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


# --------------------------------------------------------------------------------------------------------------------
# Several curves merged into one: the mean over ranks with their range, and a smoothed line.


MAX_BUCKETS = 512
"""Number of intervals of steps over which values are averaged, if ranks report at different steps."""

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot."""

    label: str
    points: Sequence[Point]
    """Points (place on the axis, value) in the order of arrival; values may be NaN or infinite."""
    band: Sequence[tuple[float, float, float]] = ()
    """Range around the line, as (place, lowest, highest)."""
    style: int = 0
    """Number of the line's style; each label has its own."""
    density: float = 0.0
    """Reported values for each unit of the horizontal axis, on average, where the curve was thinned; otherwise 0."""


def series_of(label: str, curve: Curve, style: int, places: Places = by_step) -> Series:
    """Return the line of one rank."""
    points = places(curve)
    return Series(label=label, points=points, style=style, density=_density([curve], points))


def _density(curves: Iterable[Curve], points: Sequence[Point]) -> float:
    """Return the density to two digits: a smoothed line then seldom changes as a whole."""
    count = max(curve.count for curve in curves)
    span = points[-1][0] - points[0][0] if points else 0
    return float(f"{count / span:.2g}") if count > len(points) and span > 0 else 0.0


def mean_of(label: str, curves: Iterable[Curve], style: int, places: Places = by_step) -> Series:
    """Return the mean over ranks, and the lowest and highest of them as its band.

    Ranks that report at the same steps are averaged step by step, as far as each has come. Otherwise each rank's
    values are averaged over intervals of steps, and interpolated between its first and last step. Where a rank is NaN
    or infinite, so is the mean.
    """
    curves = list(curves)
    every = [points for curve in curves if (points := sorted(places(curve), key=lambda point: point[0]))]
    if not every:
        return Series(label=label, points=(), style=style)
    steps = [step for step, _ in max(every, key=len)]
    distinct = all(before < after for before, after in itertools.pairwise(steps))
    # During a run some ranks are a report ahead.
    if distinct and all([step for step, _ in points] == steps[: len(points)] for points in every):
        columns = [[points[at][1] for points in every if at < len(points)] for at in range(len(steps))]
    else:
        steps, columns = _bucketed(every)
    points = [(step, _mean(values)) for step, values in zip(steps, columns, strict=True) if values]
    finite = [(step, [*filter(math.isfinite, values)]) for step, values in zip(steps, columns, strict=True)]
    band = [(step, min(values), max(values)) for step, values in finite if values] if len(every) > 1 else []
    return Series(label=label, points=points, band=band, style=style, density=_density(curves, points))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _bucketed(every: Sequence[Sequence[Point]]) -> tuple[list[float], list[list[float]]]:
    low, high = min(points[0][0] for points in every), max(points[-1][0] for points in every)
    whole = all(isinstance(step, int) for points in every for step, _ in points)
    most = max(len({step for step, _ in points}) for points in every)
    num = min(MAX_BUCKETS, int(high - low) + 1 if whole else MAX_BUCKETS, most)
    columns: list[list[float]] = [[] for _ in range(num)]
    for points in every:
        for bucket, value in _rank_buckets(points, low, high, num):
            columns[bucket].append(value)
    middles = [low + (high - low) * (bucket + 0.5) / num for bucket in range(num)] if high > low else [low]
    return [round(middle) for middle in middles] if whole else middles, columns


def _rank_buckets(points: Sequence[Point], low: float, high: float, num: int) -> list[tuple[int, float]]:
    held: dict[int, list[float]] = {}
    for step, value in points:
        bucket = int((step - low) * num // (high - low)) if high > low else 0
        held.setdefault(min(bucket, num - 1), []).append(value)
    means = [(bucket, _mean(values)) for bucket, values in sorted(held.items())]
    filled = means[:1]
    for (left, before), (right, after) in itertools.pairwise(means):
        # Where a neighbour is NaN, what lies between is as well.
        slope = (after - before) / (right - left)
        filled += [(bucket, before + slope * (bucket - left)) for bucket in range(left + 1, right)]
        filled.append((right, after))
    return filled


def smooth(points: Sequence[Point], weight: float, density: float = 0.0) -> list[Point]:
    """Return the exponential moving average, corrected for its start; values that are not finite stay as they are.

    Args:
        points: (step, value).
        weight: Weight of the past, 0 (none) to less than 1.
        density: Values for each step where a curve was thinned: its old part may be thinner than its new part, and is
            smoothed over as many steps. 0 if each value has a point.
    """
    smoothed, total, norm, last = [], 0.0, 0.0, None
    for step, value in points:
        if not math.isfinite(value):
            smoothed.append((step, value))
            continue
        values = 1.0 if last is None else max(1.0, (step - last) * density)
        past, last = weight**values, step
        total = past * total + (1 - past) * value
        norm = past * norm + (1 - past)
        smoothed.append((step, total / norm))
    return smoothed
