"""Small multiples: one plot for each metric, all in the same style, under one legend."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from notebook_launcher.colours import line_style
from notebook_launcher.drawing.charts import charts_of, places_on
from notebook_launcher.drawing.lines import draw_series, mean_of, oddities, series_of, smooth
from notebook_launcher.drawing.scales import (
    SIZE,
    SMALL,
    Scale,
    SvgPicture,
    document,
    make_scale,
    marker,
    name_place,
    pixels,
    place_ticks,
    shorten,
    stack,
    text,
    text_width,
    tick_labels,
)
from notebook_launcher.wording import escape, one_line, plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from notebook_launcher.drawing.charts import AxisKind, Chart, Places
    from notebook_launcher.drawing.lines import Series
    from notebook_launcher.history.curves import Curves


MAX_PLOTS = 24
MAX_MARKS = 50
"""Marks in a plot; more could not be distinguished."""
MAX_POINTS = 30_000
"""Points in a picture, shared among its lines: about 300 kB."""
PLOT_WIDTH = 290.0
"""Smallest width of a plot among several, in pixels."""
GAP, HEAD, FOOT, EDGE = 22.0, 24.0, 20.0, 8.0
ROW = 18.0
"""Pixels between two rows of a legend."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Contents of one metric's plot."""

    title: str
    series: tuple[Series, ...]
    note: str = ""
    """Text beside the title."""
    names_lines: bool = False
    """True if the plot names its own lines, because they differ in meaning from the lines of other plots."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """Options of all plots of a picture."""

    width: float = 720.0
    log: bool = False
    smoothing: float = 0.0
    axis: AxisKind = "step"
    """Quantity on the horizontal axis."""
    grouped: bool = True
    """True if the same quantity of several parts of the data, such as `train/loss` and `val/loss`, shares a plot."""
    average: bool | None = None
    """True if the mean of the ranks is drawn, False if each rank is; None: the mean of many."""
    least_span: float = 0.0
    """Length of a vertical axis at least, as a part of its largest value."""
    marks: tuple[tuple[float, str], ...] = ()
    """Moments to mark in each plot: the place on the axis, and a word for what happened there."""


def draw_plots(plots: Sequence[Plot], options: PlotOptions, *, legend: Sequence[tuple[int, str]]) -> SvgPicture:
    """Return the first `MAX_PLOTS` plots in rows, with the legend above and a note on the others below.

    Args:
        plots: Plots in the order in which they are drawn.
        options: Options of all plots.
        legend: Entries (style, label), one for each kind of line.
    """
    shown, left_out = plots[:MAX_PLOTS], plots[MAX_PLOTS:]
    parts = [_legend(legend, options.width)] if legend else []
    parts += list(_rows(shown, options, num_lines=len(legend)))
    if left_out:
        names = ", ".join(one_line(plot.title, 40) for plot in left_out[:20])
        words = f"{len(left_out)} more not drawn: {names}"
        parts.append(SvgPicture(options.width, 14, text(0, 11, words, width=options.width)))
    return stack(parts, gap=16)


def _legend(entries: Sequence[tuple[int, str]], width: float) -> SvgPicture:
    parts: list[str] = []
    x, row = 0.0, 0
    for style, label in entries:
        words = shorten(one_line(label, 80), width - 34, SMALL)
        room = 30 + text_width(words, SMALL)
        if x and x + room > width:
            x, row = 0.0, row + 1
        y = row * ROW + 8
        parts.append(_sample(style, x, y, 24, marked=len(entries) > 1) + text(x + 30, y + 4, words))
        x += room + 18
    return SvgPicture(width, (row + 1) * ROW - 2, "".join(parts))


def _sample(style: int, x: float, y: float, length: float, *, marked: bool = True) -> str:
    """Return a piece of a line with its marker."""
    look = line_style(style)
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    line = f'<path d="M{pixels(x)} {pixels(y)}h{pixels(length)}" stroke="{look.colour}" stroke-width="1.8"{dash}/>'
    return line + marker(look, [(x + length / 2, y)] if marked else [])


def _rows(plots: Sequence[Plot], options: PlotOptions, *, num_lines: int) -> Iterator[SvgPicture]:
    if not plots:
        return
    num_columns = max(1, min(len(plots), int((options.width + GAP) // (PLOT_WIDTH + GAP))))
    width = (options.width - GAP * (num_columns - 1)) / num_columns
    height = 200.0 if len(plots) == 1 else 124.0
    num_paths = sum(1 + bool(options.smoothing) + bool(series.band) for plot in plots for series in plot.series)
    points = int(min(width, max(40, MAX_POINTS / 2 / max(num_paths, 1))))
    boxes = [_PlotBox(plot, options, height, num_lines=num_lines) for plot in plots]
    # Plots below each other are aligned.
    margins = [max(box.margin for box in boxes[place::num_columns]) for place in range(num_columns)]
    steps = _common_steps(plots)
    lefts = [place * (width + GAP) for place in range(num_columns)]
    for start in range(0, len(boxes), num_columns):
        row = boxes[start : start + num_columns]
        body = "".join(
            f'<g transform="translate({pixels(left)} 0)">{box.draw(width, margin, steps, points)}</g>'
            for left, margin, box in zip(lefts, margins, row, strict=False)
        )
        yield SvgPicture(options.width, HEAD + height + FOOT, body)


def _common_steps(plots: Sequence[Plot]) -> tuple[float, float] | None:
    every = [step for plot in plots for series in plot.series for step, _ in series.points]
    return (min(every), max(every)) if every else None


class _PlotBox:
    """One plot: title, axes, lines."""

    def __init__(self, plot: Plot, options: PlotOptions, height: float, *, num_lines: int) -> None:
        self._plot, self._options, self._num_lines = plot, options, max(num_lines, len(plot.series), 1)
        values = [value for series in plot.series for _, value in series.points]
        values += [value for series in plot.series for _, *ends in series.band for value in ends]
        self._bottom = HEAD + height
        self._y = make_scale(values, self._bottom, HEAD, log=options.log, least_span=options.least_span)
        ticks = self._y.ticks(5) if self._y else []
        self._ticks = list(zip(ticks, tick_labels(ticks), strict=True))
        self.margin = max(
            [text_width(options.axis, SMALL) + 12, *(text_width(label, SMALL) + 8 for _, label in self._ticks)]
        )

    def draw(self, width: float, margin: float, common: tuple[float, float] | None, points: int) -> str:
        x = self._steps(margin, width, common)
        if x is None or self._y is None:
            return self._title(width, self._why_empty()) + self._empty(width, margin)
        marks, note = oddities(self._plot.series, x, self._y, lambda place: name_place(self._options.axis, place))
        note = ", ".join(part for part in (self._plot.note, note) if part)
        weight, lines = self._options.smoothing, ""
        for place, series in enumerate(self._plot.series):
            shown = smooth(series.points, weight, series.density) if weight else series.points
            lines += draw_series(series, shown, x, self._y, points, place=place, num=self._num_lines)
        return self._title(width, note) + self._axes(x) + self._moments(x) + lines + marks

    def _moments(self, x: Scale) -> str:
        inside = [(step, words) for step, words in self._options.marks if x.low <= step <= x.high]
        lines = "".join(_moment(x(step), self._bottom, words) for step, words in inside[:MAX_MARKS])
        words = [(step, words) for step, words in inside if x(step) + text_width(words, SMALL) + 3 < x.end]
        return lines + (text(x(words[-1][0]) + 3, HEAD + 10, words[-1][1]) if words else "")

    def _steps(self, margin: float, width: float, common: tuple[float, float] | None) -> Scale | None:
        own = _common_steps([self._plot])
        if own is None or common is None:
            return None
        # The same steps for all plots, so that a metric which came late is seen to; but one that counts in another
        # unit (epochs) would be squeezed into a corner.
        low, high = common if own[1] - own[0] >= 0.25 * (common[1] - common[0]) else own
        return make_scale((low, high), margin, width - EDGE, margin=0.0)

    def _title(self, width: float, note: str) -> str:
        names, width = self._names(width) if self._plot.names_lines else ("", width)
        room = text_width(note, SMALL) + 12 if note else 0.0
        note = shorten(note, 0.6 * width, SMALL)
        title = text(0, 13, one_line(self._plot.title), bold=True, size=SIZE, width=width - min(room, 0.6 * width + 12))
        return names + title + (text(width - EDGE, 13, note, anchor="end") if note else "")

    def _names(self, width: float) -> tuple[str, float]:
        """Return the names of the lines at the right end of the head, and the width that they leave."""
        body, right = "", width - EDGE
        for series in reversed(self._plot.series):
            words = one_line(series.label, 40)
            left = right - text_width(words, SMALL) - 24
            if left < 0.3 * width:
                break
            body += _sample(series.style, left, 9, 18) + text(left + 24, 13, words)
            right = left - 12
        return body, right

    def _why_empty(self) -> str:
        values = [value for series in self._plot.series for _, value in series.points]
        if not values:
            return "no values"
        return "no positive value" if self._options.log and any(map(math.isfinite, values)) else "no finite value"

    def _empty(self, width: float, margin: float) -> str:
        box = f'width="{pixels(width - margin - EDGE)}" height="{pixels(self._bottom - HEAD)}"'
        return (
            f'<rect x="{pixels(margin)}" y="{pixels(HEAD)}" {box} stroke="currentColor" '
            'stroke-opacity="0.3" stroke-dasharray="3 4"/>'
        )

    def _axes(self, x: Scale) -> str:
        assert self._y is not None
        right, bottom, places = pixels(x.end), pixels(self._bottom), place_ticks(self._options.axis, x)
        marks = "".join(f"M{pixels(x(tick))} {bottom}v4" for tick, _ in places)
        grid = "".join(f"M{pixels(x.start)} {pixels(self._y(tick))}H{right}" for tick, _ in self._ticks)
        labels = "".join(text(x.start - 6, self._y(tick) + 4, label, anchor="end") for tick, label in self._ticks)
        return (
            f'<path d="{grid}" stroke="currentColor" stroke-opacity="0.22"/>'
            f'<path d="M{pixels(x.start)} {bottom}H{right}{marks}" '
            f'stroke="currentColor" stroke-opacity="0.7"/>{labels}{self._step_labels(x, places)}'
        )

    def _step_labels(self, x: Scale, places: Sequence[tuple[float, str]]) -> str:
        base = self._bottom + 16
        body = text(x.start - 10, base, self._options.axis, anchor="end")
        free = x.start - 6
        for tick, label in places:
            half = text_width(label, SMALL) / 2
            # A label at an end of the axis stays within it.
            middle = min(max(x(tick), x.start - 6 + half), x.end + EDGE - half)
            if middle - half >= free:
                body += text(middle, base, label, anchor="middle")
                free = middle + half + 8
        return body


def _moment(x: float, bottom: float, words: str) -> str:
    """Return the line of a mark, which a pointer finds within some pixels and which then shows the words."""
    line = f'd="M{pixels(x)} {pixels(HEAD)}V{pixels(bottom)}" stroke="currentColor"'
    return (
        f'<g class="change"><title>{escape(words)}</title><path {line} stroke-opacity="0" stroke-width="9" '
        f'pointer-events="stroke"/><path {line} stroke-opacity="0.6" stroke-dasharray="2 3"/></g>'
    )


# --------------------------------------------------------------------------------------------------------------------
# Plots of one run's metrics: a plot for each metric, with a line for each rank or their mean.


MAX_LINES = 6
"""Largest number of lines in a plot; more ranks are drawn as their mean."""
MEAN = "mean of the ranks; the band spans from the lowest to the highest"


def curves_svg(
    curves: Curves,
    names: Iterable[str] | None = None,
    *,
    width: float = 720.0,
    log: bool = False,
    smoothing: float = 0.0,
    average: bool = False,
    grouped: bool = True,
    axis: AxisKind = "step",
) -> str:
    """Return metrics as one `<svg>`: small multiples with a legend.

    A value that is NaN or infinite is a gap with a mark at the edge of its plot. At most 24 metrics are drawn; a
    line counts the others.

    Args:
        curves: The metrics of a run.
        names: The metrics to draw, in this order; None: all, in the order in which they appeared. A metric that no rank
            reported gets an empty plot.
        width: In pixels; a page that is narrower scales the picture down.
        log: True if values are drawn on a logarithmic scale, which leaves out zero and negative values.
        smoothing: The weight of the past in an exponential moving average, 0 to less than 1; what was reported
            stays visible behind it.
        average: True to draw the mean of the ranks instead of each rank. With more than six ranks of a metric
            the mean is drawn in any case.
        grouped: True if the same quantity of several parts of the data, such as `train/loss` and `val/loss`, shares a
            plot, with a line for the mean of each.
        axis: Quantity on the horizontal axis: `"step"`, `"time"` (since the launch) or `"epoch"`.
    """
    options = PlotOptions(width=width, log=log, smoothing=smoothing, axis=axis, grouped=grouped)
    picture = curves_picture(curves, names, options, average=average)
    return document(picture, f"Curves of {plural(len(curves), 'metric')} by {axis}")


def curves_picture(
    curves: Curves, names: Iterable[str] | None, options: PlotOptions, *, average: bool = False
) -> SvgPicture:
    """Return the picture that `curves_svg` puts into a document."""
    chosen = list(curves.names if names is None else names)
    if not chosen:
        return SvgPicture(options.width, 20, text(0, 14, "No metrics were reported."))
    most = max((len(curves[name]) for name in chosen if name in curves), default=0)
    fold = average or most > MAX_LINES
    places = places_on(options.axis, curves)
    charts = charts_of(chosen, grouped=options.grouped)
    plots = [plot_of(curves, chart, places, fold=fold) for chart in charts]
    legend = sorted({(one.style, one.label) for plot in plots if not plot.names_lines for one in plot.series})
    if fold or not legend:
        banded = any(series.band for plot in plots for series in plot.series)
        legend = [(0, MEAN)] if banded else []
    return draw_plots(plots, options, legend=legend)


def plot_of(curves: Curves, chart: Chart, places: Places, *, fold: bool) -> Plot:
    """Return the plot of a chart: a line for each rank, or with `fold` and for several metrics their means."""
    if len(chart.members) > 1:
        return _group_plot(curves, chart, places)
    name = chart.members[0][1]
    ranks = curves[name] if name in curves.names else {}
    if not fold:
        lines = tuple(series_of(f"rank {rank}", curve, rank, places) for rank, curve in sorted(ranks.items()))
        return Plot(title=name, series=lines)
    note = f"{len(ranks)} ranks" if len(ranks) > 1 else "".join(f"rank {rank} only" for rank in ranks)
    return Plot(title=name, series=(mean_of("mean of ranks", ranks.values(), 0, places),) if ranks else (), note=note)


def _group_plot(curves: Curves, chart: Chart, places: Places) -> Plot:
    """Return the plot of several metrics: the mean of the ranks for each, named in the plot itself."""
    lines = [
        mean_of(part, curves[name].values(), style, places)
        for style, (part, name) in enumerate(chart.members)
        if name in curves
    ]
    return Plot(title=chart.title, series=tuple(lines), names_lines=True)
