"""The live page of `compare(...)`: the plots of the monitor, with a line for each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_launcher.drawing.legend import legend_item
from notebook_launcher.widgets.assets import STATIC, join_modules, monitor_css
from notebook_launcher.widgets.monitor.monitor import plot_options
from notebook_launcher.widgets.monitor.plot_feed import MAX_FILE, plotting_item

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.widgets.runs.comparison import Comparison

TOO_LARGE = "runs.csv is too large for the page: compare(...).to_csv('runs.csv') writes it"


class ComparisonPage:
    """Answers the page that shows a comparison.

    Args:
        comparison: The comparison.
        send: Sends a message to the page.
    """

    def __init__(self, comparison: Comparison, send: Callable[[dict[str, Any]], object]) -> None:
        self._comparison = comparison
        self._send = send
        self._options = comparison.options
        """Options by which the page draws the plots."""

    def receive(self, content: Any) -> None:
        """Answer a message of the page; what is no request is ignored."""
        comparison = self._comparison
        match content.get("type") if isinstance(content, dict) else None:
            case "hello":
                self._options = comparison.options
                self._send({"type": "reset", "legend": legend_item(), "run": {}, **self._plots(0)})
            case "draw":
                self._options = plot_options(content)
                self._update(**self._plots(content.get("turn", 0)))
            case "zoom":
                key, low, high = (content.get(name) for name in ("key", "low", "high"))
                if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high:
                    self._update(zoomed=comparison.zoomed_items(self._options, str(key), low, high))
            case "csv":
                text = comparison.to_csv()
                if len(text) > MAX_FILE:
                    self._update(notices=[TOO_LARGE])
                else:
                    self._update(files=[{"page": content.get("page", ""), "name": "runs.csv", "text": text}])

    def _update(self, **news: Any) -> None:
        self._send({"type": "update", **news})

    def _plots(self, turn: int) -> dict[str, Any]:
        items, metrics = self._comparison.plot_items(self._options), self._comparison.metrics
        return {
            "plots": items,
            "plotting": plotting_item(self._options, metrics, [item["key"] for item in items], turn),
        }


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
        self.page = ComparisonPage(comparison, self.send)
        super().__init__(tables=comparison.tables_html(), **traits)
        self.on_msg(lambda _, content, __: self.page.receive(content))
