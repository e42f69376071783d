"""Several runs side by side: curves in one plot for each metric, settings that differ, speed and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import itertools
import math
import os
import re
import string
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.archive.recorded import RecordedRun, check_axis
from notebook_launcher.drawing.charts import charts_of, places_on
from notebook_launcher.drawing.lines import mean_of
from notebook_launcher.drawing.plots import Plot, PlotOptions, draw_plots
from notebook_launcher.drawing.run_picture import picture_html, plain_settings
from notebook_launcher.drawing.scales import document
from notebook_launcher.drawing.tables import Column, joined, note_html, table_html, table_text, terminal_width
from notebook_launcher.errors import ConfigError
from notebook_launcher.history import run_folders
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.folder_files import read_bytes
from notebook_launcher.history.schema import RankFailure, RankSnapshot, RunSnapshot
from notebook_launcher.kernel.results import Results
from notebook_launcher.widgets.monitor.plot_feed import (
    csv_of,
    curves_between,
    line_item,
    losses_first,
    title_items,
    zoomed_item,
)
from notebook_launcher.wording import bounded, format_bytes, format_number, format_seconds, one_line, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from notebook_launcher.drawing.charts import AxisKind, Chart, Places
    from notebook_launcher.history.schema import MetricPoint, RunReader

HIGHER = re.compile(r"acc(uracy)?($|\W|_)|f1|auc|bleu|rouge|score|reward|iou|precision|recall|r2", re.IGNORECASE)
LOWER = re.compile(r"loss|err(or)?($|\W|_)|perplexity|ppl|mse|mae|wer($|\W|_)|cer($|\W|_)|nll", re.IGNORECASE)
"""Names of metrics that are better if they are higher, or lower."""
MAX_METRICS = 40
"""Metrics whose last and best values are in a table."""
DISPENSABLE = ("started", "id", "ranks", "state", "peak memory", "samples/s, all ranks")
"""Columns that a narrow terminal leaves out, the first of them first."""
MEANS = "Each line is the mean of a run's ranks; the band around it spans from the lowest rank to the highest."


def compare(
    *runs: RunReader | Results | str | os.PathLike[str],
    metrics: str | Iterable[str] | None = None,
    axis: AxisKind = "step",
    grouped: bool = True,
) -> Comparison:
    """Return several runs side by side, as they are now: curves, settings, speed and memory.

        compare(run_a, run_b, metrics="loss")

    Args:
        runs: Runs or results that `launch`, `notebook_launch`, `open_run` or `runs()` returned, or ids of runs, as in
            `open_run`. `Results` of a run that left no folder have neither curves nor settings; only their times and
            memory are compared.
        metrics: Names of the metrics to draw. None: all, in the order in which they appeared.
        axis: Quantity on the horizontal axis: `"step"`; `"time"`, since each run's launch; or `"epoch"`, for runs
            that report a metric of that name.
        grouped: True if the same quantity of several parts of the data, such as `train/loss` and `val/loss`, shares a
            plot. The plots of a group have a line for each run and part.

    Raises:
        ConfigError: There is no run; an argument is not a run; no run has reported a metric; or there is no such axis.
        LookupError: No run with such an id has left a folder.
    """
    if not runs:
        raise ConfigError(
            "compare() got no run. Type compare(run_a, run_b) with what launch() returned, or ids that runs() lists."
        )
    taken = [read_run(run, place) for place, run in enumerate(runs, 1)]
    known = list(dict.fromkeys(name for run in taken for name in run.curves.names))
    check_axis(axis, known)
    return Comparison(taken, _chosen(metrics, known), PlotOptions(axis=axis, grouped=grouped))


def _chosen(metrics: str | Iterable[str] | None, known: Sequence[str]) -> list[str]:
    if metrics is None:
        return list(known)
    chosen = [metrics] if isinstance(metrics, str) else list(metrics)
    for name in chosen:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            there = ", ".join(repr(one_line(other, 40)) for other in known[:20]) or "none"
            hint = f"Did you mean {close[0]!r}?" if close else f"There are: {there}."
            raise ConfigError(f"metrics={metrics!r}: no run has reported {name!r}. {hint}")
    return chosen


def _letters() -> Iterator[str]:
    """Yield A, B ... Z, AA, AB ...: a name for each run."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_uppercase, repeat=length))


@dataclasses.dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the runs that are compared, as it is at that moment."""

    snapshot: RunSnapshot
    curves: Curves
    reader: RunReader | None = None
    """What reads all points, of which the curves keep a part; None: the run left no folder."""
    beginning: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What it began with, as text by name: random states, code and versions."""


class Comparison:
    """Runs side by side, each under a letter; `compare` returns it, and a notebook shows it as curves and tables."""

    def __init__(self, runs: Sequence[ComparedRun], metrics: Sequence[str], options: PlotOptions | None = None) -> None:
        self._all = dict(zip(_letters(), runs, strict=False))
        self._runs = {letter: run.snapshot for letter, run in self._all.items()}
        self._metrics = list(metrics)
        self.options = options or PlotOptions()
        """Options of the plots."""

    @property
    def runs(self) -> dict[str, RunSnapshot]:
        """Snapshots of the runs from the moment of the comparison, by letter."""
        return dict(self._runs)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that are drawn."""
        return list(self._metrics)

    @property
    def settings(self) -> dict[str, dict[str, str]]:
        """Arguments, options, random states, code and versions that differ, as text, by name and letter.

        A run without such a setting is left out. The values of environment variables are not shown. Of code and random
        states a few digits stand for the whole.
        """
        known = {
            letter: {**plain_settings(run.snapshot), **run.beginning}
            for letter, run in self._all.items()
            if run.snapshot.config
        }
        names = dict.fromkeys(name for settings in known.values() for name in settings)
        every = {name: {key: value[name] for key, value in known.items() if name in value} for name in names}
        return {name: row for name, row in every.items() if len(row) < len(known) or len(set(row.values())) > 1}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds from each run's launch to its end or, if it is not over, to the comparison."""
        return {letter: run.seconds for letter, run in self._runs.items()}

    @property
    def samples_per_second(self) -> dict[str, float]:
        """Samples of all ranks per second, as an Accelerator counted them, for the runs that have one."""
        return {letter: speed for letter, run in self._runs.items() if (speed := run.samples_per_second) is not None}

    @property
    def peak_memory(self) -> dict[str, int]:
        """Bytes of resident memory of each run's largest rank: its peak or, if it is not over, its memory now."""
        return {letter: memory for letter, run in self._runs.items() if (memory := _memory(run)) is not None}

    @property
    def best(self) -> dict[str, dict[str, tuple[float, int]]]:
        """Best value of each metric whose name tells what is better, as a mean of the ranks, and its step; by letter.

        Losses and errors are better if they are lower, accuracies and scores if they are higher.
        """
        found: dict[str, dict[str, tuple[float, int]]] = {}
        for name in self._metrics:
            sign = _sign(name)
            for letter, points in self._means(name).items() if sign else ():
                ranked = sorted((sign * value, step) for step, value in points)
                found.setdefault(name, {})[letter] = (sign * ranked[0][0], int(ranked[0][1]))
        return found

    @property
    def final(self) -> dict[str, dict[str, float]]:
        """Last value of each metric, as a mean of the ranks, by letter."""
        return {name: {key: points[-1][1] for key, points in self._means(name).items()} for name in self._metrics}

    def _means(self, name: str) -> dict[str, list[tuple[float, float]]]:
        """Return the finite means of a metric's ranks with their steps, for the runs that have any."""
        means = {
            letter: [point for point in mean_of(letter, run.curves[name].values(), 0).points if math.isfinite(point[1])]
            for letter, run in self._all.items()
            if name in run.curves
        }
        return {letter: points for letter, points in means.items() if points}

    def svg(self, *, width: float = 720.0, log: bool = False, smoothing: float = 0.0) -> str:
        """Return the curves as one `<svg>`: a plot for each metric, a line for each run, the mean of its ranks.

        Args:
            width: Width in pixels.
            log: True for a logarithmic scale of the values.
            smoothing: Weight of the past in an exponential moving average, 0 to less than 1.
        """
        options = dataclasses.replace(self.options, width=width, log=log, smoothing=smoothing)
        plots = [self._plot(chart, self._placed(options.axis)) for chart in self._charts(options)]
        return document(draw_plots(plots, options, legend=list(enumerate(self._labels()))), self._headline())

    def _labels(self) -> list[str]:
        return [f"{letter}: {one_line(run.name, 60)}" for letter, run in self._runs.items()]

    def _charts(self, options: PlotOptions) -> list[Chart]:
        return charts_of(self._metrics, grouped=options.grouped)

    def _placed(self, axis: AxisKind) -> list[tuple[Curves, Places]]:
        return [(run.curves, places_on(axis, run.curves)) for run in self._all.values()]

    def _plot(self, chart: Chart, placed: Sequence[tuple[Curves, Places]]) -> Plot:
        """Return the plot of a chart; in a group each run and part of the data has a style of its own."""
        is_group = len(chart.members) > 1
        lines = []
        for run, (letter, label, (curves, places)) in enumerate(zip(self._all, self._labels(), placed, strict=True)):
            for at, (part, name) in enumerate(chart.members):
                if name in curves:
                    style = run * len(chart.members) + at
                    words = f"{letter} {part}" if is_group else label
                    lines.append(mean_of(words, curves[name].values(), style, places))
        return Plot(title=chart.title, series=tuple(lines), names_lines=is_group)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return what the ranks of all runs reported, a line for each value: run, metric, rank, step, seconds, value.

        Args:
            path: File to which the text is written, too; None: none.
        """
        chosen = set(self._metrics)
        points = {
            letter: (
                dataclasses.replace(at, values={name: at.values[name] for name in at.values if name in chosen})
                for at in _points(run)
            )
            for letter, run in self._all.items()
        }
        text = csv_of(points)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __repr__(self) -> str:
        width = terminal_width()
        parts = [self._headline(), *table_text(self._run_columns(), width, dispensable=DISPENSABLE)]
        if metrics := self._metric_columns():
            parts += ["", "last and best values:", *table_text(metrics, width)]
        settings = self._setting_columns()
        parts += ["", "settings that differ:", *table_text(settings, width)] if settings else []
        return bounded("\n".join(parts), "as_html() has all")

    def _repr_html_(self) -> str:
        return self.as_html()

    def as_html(self) -> str:
        """Return curves and tables as an HTML fragment without scripts and references to other files."""
        if not self._metrics:
            return self.tables_html()
        words = f"Curves of {', '.join(one_line(name, 40) for name in self._metrics[:20])}"
        return joined([self.tables_html(), picture_html(self.svg(), words), note_html(MEANS)])

    def tables_html(self) -> str:
        """Return the tables alone as an HTML fragment."""
        metrics, settings = self._metric_columns(), self._setting_columns()
        return joined(
            [
                table_html(self._run_columns(), caption=self._headline()),
                table_html(metrics, caption="Last and best values") if metrics else "",
                table_html(settings, caption="Settings that differ") if settings else "",
            ]
        )

    def _ipython_display_(self) -> None:
        from notebook_launcher.kernel.display.sink import make_sink

        sink = make_sink()
        if not (self._metrics and sink.has_audience):
            return sink.display(self._repr_mimebundle_())
        from notebook_launcher.widgets.place import show_live
        from notebook_launcher.widgets.runs.comparison_view import ComparisonView

        return show_live(ComparisonView(self), sink, self.as_html(), repr(self))

    def plot_items(self, options: PlotOptions) -> list[dict[str, Any]]:
        """Return the plots as the page of a monitor takes them, drawn with these options."""
        placed = self._placed(options.axis)
        return [
            {
                "key": chart.title,
                **title_items(chart),
                "latest": "",
                "lines": [
                    {**line_item(series, options.smoothing)[0], "rank": None, "latest": _last(series.points)}
                    for series in self._plot(chart, placed).series
                ],
            }
            for chart in losses_first(self._charts(options))
        ]

    def zoomed_items(self, options: PlotOptions, key: str, low: float, high: float) -> list[dict[str, Any]]:
        """Return a plot between two places on the axis, as fine as the ranks reported it; no item: there is no plot."""
        items = []
        for chart in (chart for chart in self._charts(options) if chart.title == key):
            placed = [
                curves_between(_points(run), chart, options.axis, run.curves, low, high) for run in self._all.values()
            ]
            items.append(zoomed_item(key, self._plot(chart, placed).series, options, low, high))
        return items

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        bundle = {"text/plain": repr(self), "text/html": self._repr_html_()}
        return {**bundle, "image/svg+xml": self.svg()} if self._metrics else bundle

    def _headline(self) -> str:
        return f"{plural(len(self._runs), 'run')} compared"

    def _run_columns(self) -> list[Column]:
        runs = self._runs.values()
        speeds, memories = self.samples_per_second, self.peak_memory
        return [
            Column("", list(self._runs)),
            Column("run", [one_line(run.name, 40) for run in runs], can_shrink=True),
            Column("state", [run.state for run in runs], kind="state"),
            Column("ranks", [str(run.num_processes) for run in runs], kind="number"),
            *_measure("samples/s, all ranks", self._runs, speeds, lambda speed: format_number(speed, 3)),
            *_measure("time", self._runs, self.seconds, format_seconds),
            *_measure("peak memory", self._runs, memories, format_bytes),
            Column("id", [run.id for run in runs]),
            Column("started", [_when(run.started) for run in runs]),
            Column("error", [one_line(run.error, 60) for run in runs], can_shrink=True),
        ]

    def _metric_columns(self) -> list[Column]:
        """Return a table of last values, with the best run and its best value where the name tells what is better."""
        final, best = self.final, self.best
        names = self._metrics[:MAX_METRICS]
        if not names:
            return []
        of_each = [
            Column(key, [format_number(final[name].get(key)) for name in names], kind="number") for key in self._runs
        ]
        shown = Column("metric", [one_line(name, 40) for name in names], can_shrink=True)
        return [shown, *of_each, Column("best", [_leader(best.get(name, {}), _sign(name)) for name in names])]

    def _setting_columns(self) -> list[Column]:
        settings = self.settings
        if not settings:
            return []
        of_each = [Column(key, [row.get(key, "") for row in settings.values()], can_shrink=True) for key in self._runs]
        return [Column("setting", list(settings)), *of_each]


def _measure(
    name: str, runs: Iterable[str], values: Mapping[str, float], formatted: Callable[[float], str]
) -> list[Column]:
    """Return a column of values and a column of their ratios to the first run's value."""
    letters = list(runs)
    first = values.get(letters[0])
    cells = [formatted(values[letter]) if letter in values else "" for letter in letters]
    if not first or len(letters) < 2:
        return [Column(name, cells, kind="number")]
    ratios = [f"{values[letter] / first:.2f} x" if letter in values else "" for letter in letters]
    return [Column(name, cells, kind="number"), Column(f"vs. {letters[0]}", ratios, kind="number")]


def _sign(name: str) -> int:
    """Return 1 if a lower value of this metric is better, -1 if a higher one is, 0 if the name does not tell."""
    return -1 if HIGHER.search(name) else 1 if LOWER.search(name) else 0


def _leader(best: Mapping[str, tuple[float, int]], sign: int) -> str:
    """Return the run with the best value, `B: 0.12 at step 900`; empty if there is none."""
    if not best:
        return ""
    letter, (value, step) = min(best.items(), key=lambda item: sign * item[1][0])
    return f"{letter}: {format_number(value)} at step {step:,}"


def _last(points: Sequence[tuple[float, float]]) -> str:
    return format_number(points[-1][1]) if points else ""


def _memory(run: RunSnapshot) -> int | None:
    every = [memory for rank in run.ranks if (memory := rank.peak_memory or rank.memory)]
    return max(every, default=None)


def _points(run: ComparedRun) -> Sequence[MetricPoint]:
    return () if run.reader is None else run.reader.metrics_since(0)[0]


def _when(started: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else ""


# --------------------------------------------------------------------------------------------------------------------
# Reading a run from whatever stands for it: a run, a recorded run, an id, a folder, or results.


def read_run(run: Any, place: int) -> ComparedRun:
    """Return a run as it is now.

    Args:
        run: A `Run`, a `RecordedRun`, an id, a folder, or `Results`, which have curves if the run's folder exists.
        place: Position of the argument, for the error.

    Raises:
        ConfigError: `run` is none of these.
        LookupError: No run with this id has left a folder.
    """
    if isinstance(run, (str, os.PathLike)):
        from notebook_launcher.archive.listing import open_run

        run = open_run(run)
    if isinstance(run, Results):
        if run.folder is None or not run.folder.is_dir():
            return ComparedRun(_snapshot_of(run, place), Curves())
        run = RecordedRun(run.folder)
    if not all(callable(getattr(run, name, None)) for name in ("snapshot", "metrics_since")) or isinstance(run, type):
        raise ConfigError(_no_run(run, place))
    curves = Curves()
    curves.fold(run.metrics_since(0)[0])
    snapshot = run.snapshot()
    folder = getattr(run, "folder", None)
    if folder is None and (home := run_folders.find_home(snapshot.config.get("runs_folder", "auto"))) is not None:
        folder = home / snapshot.id  # Of a run in this process; it may not exist.
    return ComparedRun(snapshot, curves, run, _beginning(folder))


def _beginning(folder: Path | None) -> dict[str, str]:
    """Return random states, code and versions of a run with a folder; a few digits of a digest stand for a file."""
    if folder is None or not Path(folder).is_dir():
        return {}
    recorded = RecordedRun(folder)
    environment = recorded.environment
    git = environment.get("git") or {}
    packages = environment.get("packages") or {}
    found = {
        "random states": _digest(folder, run_folders.RANDOM),
        "code": _digest(folder, run_folders.SOURCE),
        "git commit": str(git.get("commit") or "")[:10],
        "changes since the commit": _digest(folder, run_folders.CHANGES),
        "Python": str(environment.get("python") or ""),
    }
    found |= {f"version of {name.replace('_', '-')}": str(version) for name, version in packages.items()}
    return {name: one_line(text, 80) for name, text in found.items() if text}


def _digest(folder: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        if data := read_bytes(Path(folder), name):
            return hashlib.sha256(data).hexdigest()[:8]
    return ""


def _no_run(run: Any, place: int) -> str:
    hint = "Pass what launch() returned, or an id that runs() lists."
    if isinstance(run, (list, tuple)):
        hint = "Pass the runs one by one: compare(*runs)."
    elif callable(run):
        hint = "Pass the run, not the function: run = launch(function, 2)."
    kind = "type" if isinstance(run, type) else type(run).__name__
    return f"argument {place} of compare() is not a run: {one_line(repr(run), 80)} ({kind}). {hint}"


def _snapshot_of(results: Results, place: int) -> RunSnapshot:
    """Return a snapshot with as much of the run as its results hold."""
    failures = {failure.rank: failure for failure in results.failures}
    ranks = tuple(
        RankSnapshot(
            rank=summary.rank,
            state=summary.state,
            reason=failures[summary.rank].summary if summary.rank in failures else "",
            seconds=summary.seconds,
            peak_memory=summary.peak_memory,
            returned=results.short(summary.rank),
        )
        for summary in results.ranks
    )
    return RunSnapshot(
        id="",
        name=f"results {place}",
        state="failed" if failures else "stopped" if results.stopped_by else "done",
        started=0.0,
        seconds=results.seconds,
        num_processes=len(results),
        summary="",
        seed=results.seed,
        restarts=results.restarts,
        stopped_by=results.stopped_by,
        timed_out=results.timed_out,
        ranks=ranks,
        failures=tuple(
            RankFailure(rank=failure.rank, summary=failure.summary, victim=failure.victim)
            for failure in results.failures
        ),
    )
