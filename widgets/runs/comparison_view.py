"""The live page of `compare(...)`: the plots of the monitor, with a line for each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_launcher.drawing.charts import charts_of, is_epoch
from notebook_launcher.drawing.legend import legend_item
from notebook_launcher.widgets.assets import STATIC, join_modules
from notebook_launcher.widgets.monitor.monitor import plot_options
from notebook_launcher.widgets.monitor.palette import monitor_css

if TYPE_CHECKING:
    from notebook_launcher.drawing.plots import PlotOptions
    from notebook_launcher.widgets.runs.comparison import Comparison

__all__ = ["ComparisonView"]


class ComparisonView(anywidget.AnyWidget):
    """A comparison as a widget; `compare(...)` shows it in a notebook.

    Args:
        comparison: The comparison.
    """

    _esm = join_modules(STATIC / "compared.js")
    _css = monitor_css()
    tables = traitlets.Unicode().tag(sync=True)
    """The tables as HTML."""

    def __init__(self, comparison: Comparison, **traits: Any) -> None:
        self._comparison = comparison
        super().__init__(tables=comparison.tables_html(), **traits)
        self.on_msg(lambda _, content, __: self._receive(content))

    def _receive(self, content: Any) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "hello":
            self.send({"type": "reset", "legend": legend_item(), "run": {}, **self._plots(self._comparison.options, 0)})
        elif kind == "draw":
            self.send({"type": "update", **self._plots(plot_options(content), content.get("turn", 0))})

    def _plots(self, options: PlotOptions, turn: int) -> dict[str, Any]:
        items, metrics = self._comparison.plot_items(options), self._comparison.metrics
        plotting = {
            "axis": options.axis,
            "grouped": options.grouped,
            "average": True,
            "smoothing": options.smoothing,
            "order": [item["key"] for item in items],
            "can_group": len(charts_of(metrics, grouped=True)) < len(metrics),
            "has_epochs": any(map(is_epoch, metrics)),
            "num_ranks": 1,
            "marks": [],
            "turn": turn,
        }
        return {"plots": items, "plotting": plotting}
