"""Plots in a monitor's messages: what the static picture draws, as numbers, and of each line only what is new.

Grouping, averages, smoothing, thinning and words are made here, by the modules of `drawing/`; the page draws what it
gets.
"""

from __future__ import annotations

import array
import csv
import dataclasses
import io
import itertools
import json
import math
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.charts import charts_of, is_epoch, place_of, places_on
from notebook_launcher.drawing.legend import LIMITS
from notebook_launcher.drawing.lines import smooth
from notebook_launcher.drawing.plots import PlotOptions, plot_of
from notebook_launcher.drawing.reported import without_formulas
from notebook_launcher.history.curves import Curves, thin
from notebook_launcher.history.summaries import FEWEST, usage_points
from notebook_launcher.wording import NOT_FINITE, format_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_launcher.drawing.charts import AxisKind, Chart, Places
    from notebook_launcher.drawing.lines import Series
    from notebook_launcher.history.curves import Curve
    from notebook_launcher.history.schema import MetricPoint, RankUsage

Item = dict[str, Any]

ALL_POINTS = 200_000
"""Points of all lines together in the first message: 4 MB."""
NEW_POINTS = 4000
"""Points of all lines together in an update, but for the last plot's; what has no room comes with the next one."""
MAX_FILE = 2_000_000
"""Characters of a file for the page: Jupyter's server drops what comes above 3 MB in 3 s."""
WIDTH = 16
"""Bytes of a point, of which a feed remembers what it has sent."""


class PlotFeed:
    """Metrics of a run as items PLOT.

    Args:
        options: How they are drawn.
    """

    def __init__(self, options: PlotOptions | None = None) -> None:
        self.curves = Curves()
        self.options = options or PlotOptions()
        self._stale: dict[str, None] = {}
        """Metrics with points that the page does not have, in the order in which they got them."""
        self._sent: dict[str, list[tuple[Any, bytes]]] = {}
        """By key of a plot: the head and the points of each line, as the page has them."""
        self._charts: dict[str, Chart] = {}

    def draw(self, options: PlotOptions) -> None:
        """Draw with other options from now on."""
        self.options = options
        self._stale = dict.fromkeys(self.curves.names)

    def fold(self, points: Iterable[MetricPoint]) -> None:
        """Add the points that ranks reported."""
        for name, _ in self.curves.fold(points):
            self._stale[name] = None

    def everything(self) -> list[Item]:
        """Return all plots; the more lines there are, the fewer points each has."""
        num_lines = sum(len(self.curves[name]) for name in self.curves.names)
        self._sent, self._stale = {}, dict.fromkeys(self.curves.names)
        return self.news(ALL_POINTS, limit=max(16, ALL_POINTS // max(1, num_lines)))

    def news(self, room: int = NEW_POINTS, limit: int = ALL_POINTS) -> list[Item]:
        """Return the plots that have changed: of each line what is new.

        Args:
            room: Points from which on the other plots wait for the next message.
            limit: Points of a line; longer ones are thinned.
        """
        if not self._stale:
            return []
        self._charts = {
            _key(chart): chart for chart in losses_first(charts_of(self.curves.names, grouped=self.options.grouped))
        }
        self._sent = {key: sent for key, sent in self._sent.items() if key in self._charts}
        chart_of = {name: key for key, chart in self._charts.items() for _, name in chart.members}
        places, items, done = places_on(self.options.axis, self.curves), [], set()
        for name in list(self._stale):
            key = chart_of[name]
            if key not in done:
                if room <= 0:
                    break
                done.add(key)
                items.append(self._item(key, places, limit))
                room -= sum(len(line["x"]) for line in items[-1]["lines"])
            del self._stale[name]
        return items

    def plotting(self, marks: Iterable[tuple[float, str]], turn: int) -> Item:
        """Return the item PLOTTING: the options as the page shows them, and the order of the plots."""
        names = self.curves.names
        most = max((len(self.curves[name]) for name in names), default=0)
        item = plotting_item(self.options, names, list(self._charts), turn)
        return item | {"average": self._folds(most), "num_ranks": most, "marks": [list(mark) for mark in marks]}

    def zoom(self, points: Sequence[MetricPoint], key: str, low: float, high: float) -> Item | None:
        """Return a plot of these points between two places on the axis, as fine as they are; None: there is no plot."""
        chart = self._charts.get(key)
        if chart is None:
            return None
        inside, places = curves_between(points, chart, self.options.axis, self.curves, low, high)
        every = plot_of(inside, chart, places, fold=self._folds_chart(chart)).series
        return zoomed_item(key, every, self.options, low, high)

    def _folds(self, num_ranks: int) -> bool:
        """Return True if the mean of this number of ranks is drawn."""
        average = self.options.average
        return num_ranks > 1 and (num_ranks > LIMITS.separate_ranks if average is None else average)

    def _folds_chart(self, chart: Chart) -> bool:
        return self._folds(max(len(self.curves[name]) for _, name in chart.members))

    def _item(self, key: str, places: Places, limit: int) -> Item:
        chart = self._charts[key]
        fold = self._folds_chart(chart)
        plot = plot_of(self.curves, chart, places, fold=fold)
        ranks = [self.curves[name] for _, name in chart.members]
        is_group = len(ranks) > 1
        known, sent, lines = self._sent.get(key, []), [], []
        for at, series in enumerate(plot.series):
            before = known[at] if at < len(known) else (None, b"")
            latest = latest_of(ranks[at]) if is_group else ""
            head = (series.label, self.options.smoothing, self.options.axis, series.density, limit)
            line, points = line_item(series, self.options.smoothing, head, before, limit)
            lines.append({**line, "latest": latest, "rank": None if fold or is_group else series.style})
            sent.append((head, points))
        self._sent[key] = sent
        return {
            "key": key,
            **title_items(chart),
            "latest": "" if is_group else latest_of(ranks[0]),
            "lines": lines,
        }


def plotting_item(options: PlotOptions, names: Sequence[str], order: Sequence[str], turn: int) -> Item:
    """Return the item PLOTTING of metrics without ranks of their own, whose plots have these keys."""
    return {
        "axis": options.axis,
        "grouped": options.grouped,
        "average": True,
        "smoothing": options.smoothing,
        "order": order,
        "can_group": len(charts_of(names, grouped=True)) < len(names),
        "has_epochs": any(map(is_epoch, names)),
        "num_ranks": 1,
        "marks": [],
        "turn": turn,
    }


def _key(chart: Chart) -> str:
    return json.dumps([name for _, name in chart.members])


def losses_first(charts: Iterable[Chart]) -> list[Chart]:
    """Return `loss` before names that end in it, such as `train/loss` and `val_loss`, and these before all others."""

    def place(chart: Chart) -> int:
        name = chart.title.lower()
        is_loss = name.endswith("loss") and not name.removesuffix("loss")[-1:].isalpha()
        return 0 if name == "loss" else 1 if is_loss else 2

    return sorted(charts, key=place)


def title_items(chart: Chart) -> Item:
    """Return the title of a chart, the names of its metrics, and the first part of its name, by which it is found."""
    names = [name for _, name in chart.members]
    section = chart.title.partition("/")[0] if "/" in chart.title else ""
    return {"title": chart.title, "names": names, "section": section}


def latest_of(ranks: Mapping[int, Curve]) -> str:
    """Return the last value of a metric as words: `0.25`, `0.25 mean of ranks`, `not finite on rank 3`."""
    last = {rank: curve.last[1] for rank, curve in sorted(ranks.items()) if curve.last is not None}
    broken = [str(rank) for rank, value in last.items() if not math.isfinite(value)]
    if broken:
        where = f" on rank {', '.join(broken[:3])}{'…' * (len(broken) > 3)}" if len(ranks) > 1 else ""
        return NOT_FINITE + where
    # The number comes first, because there may be no room for all words.
    gaps = f", some {NOT_FINITE}" if any(curve.has_gaps for curve in ranks.values()) else ""
    mean = sum(last.values()) / max(len(last), 1)
    return f"{format_number(mean)}{' mean of ranks' * (len(ranks) > 1)}{gaps}" if last else ""


def line_item(
    series: Series, smoothing: float, head: Any = None, before: tuple[Any, bytes] = (None, b""), limit: int = ALL_POINTS
) -> tuple[Item, bytes]:
    """Return the item LINE of a line, and its points as they are remembered.

    Args:
        series: The line.
        smoothing: Weight of the past in the smoothed line.
        head: What else the numbers depend on.
        before: What the page has of it: its head and its points.
        limit: Points from which on the line is thinned.
    """
    smoothed = [value for _, value in smooth(series.points, smoothing, series.density)] if smoothing else []
    bands = {place: (low, high) for place, low, high in series.band}
    rows: list[Any] = [(place, value, at) for at, (place, value) in enumerate(series.points)]
    if len(rows) > limit:
        rows = [*thin(rows[:-1], max(limit - 1, 4)), rows[-1]]
    # A run that was resumed goes back: of two values at a place, the later one counts.
    if any(after[0] <= before[0] for before, after in itertools.pairwise(rows)):
        rows = [row for _, row in sorted({row[0]: row for row in rows}.items())]
    flat = array.array("d", (number for place, value, _ in rows for number in (place, value)))
    points = flat.tobytes()
    keep = _common(before[1], points) if before[0] == head else 0
    new = rows[keep:]
    line: Item = {
        "label": series.label,
        "style": series.style,
        "keep": keep,
        "x": [place if isinstance(place, int) else round(place, 6) for place, _, _ in new],
        "y": [json_number(value) for _, value, _ in new],
    }
    if smoothing:
        line["smooth"] = [json_number(smoothed[at]) for _, _, at in new]
    if bands:
        ends = [bands.get(place, (math.nan, math.nan)) for place, _, _ in new]
        line |= {"low": [json_number(low) for low, _ in ends], "high": [json_number(high) for _, high in ends]}
    return line, points


def _common(old: bytes, new: bytes) -> int:
    """Return the number of points at the beginning that are the same."""
    low, high = 0, min(len(old), len(new)) // WIDTH
    if old[: high * WIDTH] == new[: high * WIDTH]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if old[: middle * WIDTH] == new[: middle * WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low


def curves_between(
    points: Iterable[MetricPoint], chart: Chart, axis: AxisKind, curves: Curves, low: float, high: float
) -> tuple[Curves, Places]:
    """Return a chart's curves of these points between two places, and what has their places on the axis.

    Args:
        points: Points of a run.
        chart: The chart.
        axis: Quantity on the horizontal axis.
        curves: All curves of the run, which have its epochs.
        low: The place at the left; what is before it, as far as from there to `high`, comes too: smoothing needs it.
        high: The place at the right.
    """
    names, place, lead = {name for _, name in chart.members}, place_of(axis, curves), low - (high - low)
    inside = Curves()
    inside.fold(
        dataclasses.replace(point, values={name: value for name, value in point.values.items() if name in names})
        for point in points
        if lead <= (point.step if axis == "step" else place(point.time)) <= high
    )

    def places(curve: Curve) -> list[tuple[float, float]]:
        return [(step if axis == "step" else place(time), value) for step, value, time in curve.timed_points()]

    return inside, places


def zoomed_item(key: str, every: Iterable[Series], options: PlotOptions, low: float, high: float) -> Item:
    """Return the item ZOOMED of a plot between two places."""
    lines = []
    for series in every:
        line, _ = line_item(series, options.smoothing)
        first = next((at for at, place in enumerate(line["x"]) if place >= low), len(line["x"]))
        first = max(first - 1, 0)
        lines.append({name: value[first:] if isinstance(value, list) else value for name, value in line.items()})
    return {"key": key, "range": [low, high], "lines": lines}


def csv_of(runs: Mapping[str, Iterable[MetricPoint]]) -> str:
    """Return what ranks reported, a line for each value: run (if it has a name), metric, rank, step, seconds, value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*["run"] * any(runs), "metric", "rank", "step", "seconds", "value"])
    for run, points in runs.items():
        rows = ((name, at.rank, at.step, at.time, value) for at in points for name, value in at.values.items())
        for name, rank, step, time, value in sorted(rows, key=lambda row: row[:2]):
            writer.writerow([*[run] * bool(run), name, rank, step, round(time, 3), f"{value:.9g}"])
    return without_formulas(text.getvalue().encode()).decode()


class UsageFeed:
    """Memory and load of a run's ranks as items PLOT, from the third sample on."""

    def __init__(self) -> None:
        self._plots = PlotFeed(PlotOptions(axis="time", grouped=False))
        self._read_to: dict[int, float] = {}
        """By rank: the time of the newest sample that was read."""

    def everything(self, usage: Mapping[int, RankUsage]) -> list[Item]:
        """Return all plots."""
        return self._plots.everything() if self._read(usage) else []

    def news(self, usage: Mapping[int, RankUsage]) -> list[Item]:
        """Return what is new since the last message."""
        return self._plots.news() if self._read(usage) else []

    def _read(self, usage: Mapping[int, RankUsage]) -> bool:
        self._plots.fold(usage_points(usage, self._read_to))
        self._read_to.update({rank: samples.times[-1] for rank, samples in usage.items() if samples.times})
        return any(len(samples.times) >= FEWEST for samples in usage.values())


def json_number(value: float | None) -> float | None:
    """Return a value for JSON, rounded to six significant digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return rounded if math.isfinite(rounded) else value  # The largest numbers may be rounded up to infinity.
