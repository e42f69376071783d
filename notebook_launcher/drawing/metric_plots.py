"""Plots of one run's metrics: a plot for each metric, with a line for each rank or their mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.drawing.averages import mean_of, series_of
from notebook_launcher.drawing.charts import charts_of, places_on
from notebook_launcher.drawing.plots import Plot, PlotOptions, draw_plots, legend_of
from notebook_launcher.drawing.svg import SvgPicture, document, text
from notebook_launcher.wording.counts import plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.drawing.charts import AxisKind, Chart, Places
    from notebook_launcher.history.curves import Curves

__all__ = ["MAX_LINES", "curves_picture", "curves_svg", "plot_of"]

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
    every = [series for plot in plots if not plot.names_lines for series in plot.series]
    legend = legend_of(every)
    if fold or not every:
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
