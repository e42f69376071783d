"""`RunsTable(runs())`: kept runs as a table to filter, sort, edit, delete and compare."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_launcher.errors import LaunchError
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.widgets.assets import STATIC, join_modules, monitor_css
from notebook_launcher.widgets.place import show_live
from notebook_launcher.widgets.runs.comparison import compare
from notebook_launcher.widgets.runs.comparison_view import ComparisonPage
from notebook_launcher.wording import format_bytes, format_metrics, format_seconds, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.archive.listing import RunList
    from notebook_launcher.archive.recorded import RecordedRun

MAX_ARGUMENTS = 8
ARGUMENT = "argument "
"""Beginning of the key of an argument's column."""
NUMBERS = ("time", "ranks", "disk")
TITLES = {"metrics": "last metrics"}
MAX_ROWS = 200
"""Runs in the table, the newest ones."""


class RunsTable(anywidget.AnyWidget):
    """Kept runs as a table: `runs()` shows it in a notebook.

    The page filters and sorts; deleting, editing and comparing are done here, when the kernel is idle.

    Args:
        runs: The runs, at most 200 of which are shown.
    """

    _esm = join_modules(STATIC / "runs.js")
    _css = join_modules(STATIC / "runs.css") + monitor_css()
    rows: Any = traitlets.List().tag(sync=True)
    """An item for each run: its cells as words, and of some the number to sort by."""
    columns: Any = traitlets.List().tag(sync=True)
    """The columns; arguments that differ between runs have one each."""
    caption = traitlets.Unicode().tag(sync=True)
    answer = traitlets.Unicode().tag(sync=True)
    """Result of the last request, in a line."""
    compared = traitlets.Unicode().tag(sync=True)
    """The tables of the comparison of the selected runs, as HTML, below live plots."""

    def __init__(self, runs: RunList, **traits: Any) -> None:
        self._runs = {run.id: run for run in runs[:MAX_ROWS]}
        self._left_out = len(runs) - len(self._runs)
        self._home = runs.home
        self._comparison: ComparisonPage | None = None
        """Answers the plots of the runs that were compared last."""
        super().__init__(**traits)
        self._renew()
        self.on_msg(lambda _, content, __: self._receive(content))

    def _renew(self) -> None:
        rows = [_row(run) for run in self._runs.values()]
        keys = dict.fromkeys(key for row in rows for key in row["cells"] if key.startswith(ARGUMENT))
        differ = [key for key in keys if len({row["cells"].get(key) for row in rows}) > 1][:MAX_ARGUMENTS]
        # The rows come last: the page draws all when they do.
        self.columns = [
            {"key": key, "title": TITLES.get(key, key.removeprefix(ARGUMENT)), "is_number": key in NUMBERS}
            for key in ("name", "tags", *differ, "when", "state", *NUMBERS, "metrics", "notes")
        ]
        self.rows = rows
        older = f", and {self._left_out} older: runs()[{MAX_ROWS}:]" if self._left_out else ""
        self.caption = f"{len(self._runs)} runs in {self._home}{older}"

    def _receive(self, content: Any) -> None:
        """Carry out a request of the page. An error becomes a line, because no cell would show it."""
        requests: dict[str, Callable[[dict[str, Any]], str]] = {
            "delete": self._delete,
            "edit": self._edit,
            "compare": self._compare,
        }
        request = requests.get(content.get("type", "")) if isinstance(content, dict) else None
        if request is None:
            if self._comparison is not None:
                self._comparison.receive(content)
            return
        try:
            self.answer = request(content)
        except (LaunchError, LookupError, OSError) as error:
            self.answer = one_line(f"{type(error).__name__}: {error}", 500)
        self._renew()

    def _chosen(self, content: dict[str, Any]) -> list[RecordedRun]:
        return [self._runs[name] for name in content.get("ids", ()) if name in self._runs]

    def _delete(self, content: dict[str, Any]) -> str:
        over = [run for run in self._chosen(content) if run.listed().is_over]
        live = len(self._chosen(content)) - len(over)
        freed = sum(run.size for run in over)
        for run in over:
            run.delete()
            del self._runs[run.id]
        rest = f"; {live} not over, and kept" if live else ""
        return f"{len(over)} deleted, {format_bytes(freed)}{rest}"

    def _edit(self, content: dict[str, Any]) -> str:
        (run,) = self._chosen(content)
        tags = [tag.strip() for tag in str(content.get("tags", "")).split(",") if tag.strip()]
        run.edit(name=str(content.get("name", "")), tags=tags, notes=str(content.get("notes", "")))
        return f"{run.name}: saved"

    def _compare(self, content: dict[str, Any]) -> str:
        chosen = self._chosen(content)
        comparison = compare(*chosen) if chosen else None
        self._comparison = None if comparison is None else ComparisonPage(comparison, self.send)
        self.compared = "" if comparison is None else comparison.tables_html()
        return ""


def _row(run: RecordedRun) -> dict[str, Any]:
    snapshot = run.listed()
    metrics = next((format_metrics(rank.metrics) for rank in snapshot.ranks if rank.metrics), "")
    size, name = run.size, one_line(snapshot.name, 200)
    arguments = {ARGUMENT + name: one_line(words, 60) for name, words in snapshot.arguments.items()}
    cells = {
        "name": name if snapshot.kind == "run" else f"{name} ({snapshot.kind})",
        "tags": ", ".join(run.tags),
        "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(snapshot.started)),
        "state": snapshot.state,
        "time": format_seconds(snapshot.seconds),
        "ranks": str(snapshot.num_processes),
        "disk": format_bytes(size),
        "metrics": metrics,
        "notes": run.notes,
    }
    searched = " ".join([run.id, *(cells[key] for key in ("name", "tags", "state", "metrics", "notes"))]).lower()
    order = {"when": snapshot.started, "time": snapshot.seconds, "ranks": snapshot.num_processes, "disk": size}
    for key, words in arguments.items():
        with contextlib.suppress(ValueError):
            order[key] = float(words)
    order = {key: value for key, value in order.items() if math.isfinite(value)}
    return {
        "id": run.id,
        "name": name,
        "tags": list(run.tags),
        "cells": {**cells, **arguments},
        "order": order,
        "searched": searched,
    }


def show(runs: RunList) -> bool:
    """Show runs as a table in the present cell; return False where no front end may draw it."""
    sink = make_sink()
    if not sink.has_audience or not len(runs):
        return False
    show_live(RunsTable(runs), sink, runs.as_html(), runs.as_text())
    return True
