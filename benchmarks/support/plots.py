"""Draw the plots of `docs/performance.md` from the tables of the reports: bars, or lines where sizes grow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "performance"
OURS = "notebook_launcher"


class Plot(NamedTuple):
    """A picture of some columns of a table, under whose heading it stands."""

    theme: str
    heading: str
    columns: tuple[int, ...]
    """Numbers of the columns, from 1 on; the first column, 0, has the names."""
    unit: str
    names: tuple[str, ...] = ()
    """Names of the columns in the legend; empty: their heads."""
    is_log: bool = False

    @property
    def path(self) -> Path:
        """The picture's file."""
        words = re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-")
        return FOLDER / f"{self.theme}-{words}.svg"


PLOTS = (
    Plot("launch", "From the call to the results, warm", (2, 4), "ms, log scale", is_log=True),
    Plot("launch", "Memory of two idle ranks", (3,), "MB"),
    Plot("large", "A tensor there and back", (1, 2, 3, 4), "ms"),
    Plot("cluster", "4 ranks", (2, 3), "ms, log scale", is_log=True),
    Plot("step_overhead", "Plain processes", (6, 8), "µs of processor time", (OURS, "accelerate")),
    Plot("step_overhead", "In a launch", (6, 8), "µs of processor time", (OURS, "accelerate")),
    Plot("gradient_sync", "One node, loopback", (1, 2, 3, 4), "ms per batch"),
    Plot("gradient_sync", "Two nodes, 1 Gbit/s", (1, 2, 3, 4), "ms per batch"),
    Plot("gradient_sync", "Two nodes, 100 Mbit/s", (1, 2, 3, 4), "ms per batch"),
    Plot("comm_hooks", "Two nodes, 100 Mbit/s", (1, 2, 3), "ms per batch"),
    Plot("sharding", "Memory and time", (3, 5), "times DDP, times fully_shard by hand"),
    Plot("growth", "A warm launch, by ranks", (), "ms", is_log=True),
    Plot("growth", "A session's call, by ranks", (), "ms", is_log=True),
    Plot("growth", "Shuffled rows of a data set", (), "", is_log=True),
    Plot("growth", "Parameter tensors, windows of 2, clipped", (), "µs", is_log=True),
)
"""Without columns: a table whose head has sizes, drawn as lines over them."""


def rows_under(report: str, heading: str) -> list[list[str]]:
    """Return the first table under a heading, its head first and without its rule; empty if there is none."""
    _, found, rest = report.partition(f"\n## {heading}\n")
    body = rest.partition("\n## ")[0] if found else ""
    lines = re.search(r"(?:^\|.*\|\n)+", body + "\n", re.MULTILINE)
    if lines is None:
        return []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return [row for row in rows if set("".join(row)) - set("- ")]


def number(cell: str) -> float | None:
    """Return the number at the beginning of a cell, such as `1,262 (n=3)`; None: it has a reason instead."""
    found = re.match(r"-?[\d,]*\.?\d+", cell)
    return float(found[0].replace(",", "")) if found else None


def pictures(theme: str, report: str) -> dict[str, str]:
    """Return the picture that follows each heading of a report, as Markdown."""
    return {
        plot.heading: f"![{plot.heading}: {plot.unit}](pictures/performance/{plot.path.name})"
        for plot in PLOTS
        if plot.theme == theme and rows_under(report, plot.heading)
    }


def draw(theme: str, report: str) -> None:
    """Write the pictures of a report."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for plot in PLOTS:
        if plot.theme == theme and (rows := rows_under(report, plot.heading)):
            _draw(plot, rows)


def _draw(plot: Plot, rows: list[list[str]]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The same bytes at each drawing: no date, and names of parts that do not depend on chance.
    with mpl.rc_context({"svg.hashsalt": plot.path.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 0.8 + 0.24 * _height(plot, rows)), layout="constrained")
        axes = figure.subplots()
        (_bars if plot.columns else _lines)(axes, plot, rows)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(plot.path, metadata={"Date": None}, transparent=False)


def _height(plot: Plot, rows: list[list[str]]) -> int:
    return len(rows[1:]) * (len(plot.columns) + 1) if plot.columns else 14


def _bars(axes: Axes, plot: Plot, rows: list[list[str]]) -> None:
    """Draw a group of bars for each row, the first row on top."""
    head, *body = rows
    names = plot.names or tuple(head[column] for column in plot.columns)
    thickness = 0.8 / len(plot.columns)
    for place, (column, name) in enumerate(zip(plot.columns, names, strict=True)):
        values = [number(row[column]) if column < len(row) else None for row in body]
        ys = [index + place * thickness for index in range(len(body))]
        bars = axes.barh(ys, [value or 0.0 for value in values], thickness * 0.92, label=name.replace("`", ""))
        axes.bar_label(bars, ["" if value is None else f" {value:,g}" for value in values], fontsize=8)
    axes.set_yticks(
        [index + 0.4 - thickness / 2 for index in range(len(body))], [row[0].replace("`", "") for row in body]
    )
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(plot.unit)
    if plot.is_log:
        axes.set_xscale("log")
    if len(plot.columns) > 1:
        axes.legend(frameon=False, fontsize=8)


def _lines(axes: Axes, plot: Plot, rows: list[list[str]]) -> None:
    """Draw a line over the sizes for each row."""
    head, *body = rows
    columns = [(column, size) for column, cell in enumerate(head) if column and (size := number(cell)) is not None]
    for row in body:
        points = [(size, value) for column, size in columns if (value := number(row[column]))]
        axes.plot(*zip(*points, strict=True), marker="o", label=row[0])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(plot.heading)
    axes.set_ylabel(plot.unit)
    axes.legend(frameon=False, fontsize=8)
