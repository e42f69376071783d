"""Runs side by side in a real browser: the plots of the monitor, with a line for each run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.drawing.plots import PlotOptions
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint, RunSnapshot
from notebook_launcher.widgets.runs.comparison import Comparison
from notebook_launcher.widgets.runs.comparison_view import ComparisonView
from tests.support.lab import needs_browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_browser

EVIL = "<img src=x onerror='window.hacked=1'>"
HARNESS = """
<!doctype html><meta charset="utf-8"><style>%(css)s</style><body><div id="root"></div>
<script type="module">
const url = URL.createObjectURL(new Blob([%(module)s], { type: "text/javascript" }));
const widget = (await import(url)).default;
let call = () => {};
window.model = {
  sent: [], get: () => %(tables)s, on(_, listener) { call = listener; }, off() { call = () => {}; },
  send(message) { this.sent.push(message); }, fire(message) { call(message); },
};
window.cleanUp = widget.render({ model, el: document.getElementById("root") });
</script>
"""
FRAMES = "async () => { for (let at = 0; at < 4; at += 1) await new Promise(requestAnimationFrame); }"


def snapshot(name: str) -> RunSnapshot:
    facts: dict[str, Any] = {"id": name, "started": 0.0, "seconds": 1.0, "num_processes": 1, "summary": "", "seed": 0}
    return RunSnapshot(name=name, state="done", ranks=(), **facts)


def curves(shift: float) -> Curves:
    made = Curves()
    values = [{"loss": shift + 1 / (step + 1), "acc": 0.5 + shift} for step in range(50)]
    made.fold(MetricPoint(rank=0, step=step, time=step / 10, values=each) for step, each in enumerate(values))
    return made


@pytest.fixture
def comparison() -> Comparison:
    return Comparison([snapshot("one"), snapshot(EVIL)], [curves(0.0), curves(0.25)], ["loss", "acc"], PlotOptions())


def test_runs_are_lines_of_live_plots_with_their_last_values(window: Page, comparison: Comparison) -> None:
    view = ComparisonView(comparison)
    sent: list[Any] = []
    view.send = sent.append
    parts = {"css": view._css, "module": json.dumps(view._esm), "tables": json.dumps(view.tables)}
    window.goto("about:blank")
    window.set_content(HARNESS % {name: part.replace("</", "<\\/") for name, part in parts.items()})
    window.wait_for_function("window.model?.sent.length")

    def answer() -> None:
        for asked in window.evaluate("model.sent.splice(0)"):
            view._receive(asked)
        for message in sent:
            window.evaluate("message => model.fire(message)", message)
        sent.clear()
        window.evaluate(FRAMES)

    answer()
    assert window.locator(".nbl-plot-name").all_inner_texts() == ["loss", "acc"]
    assert window.locator(".nbl-parts").first.inner_text().split("\n") == ["A: one 0.02", f"B: {EVIL} 0.27"]
    assert window.locator(".nbl-plot-canvas canvas").count() == 2
    window.get_by_label("Horizontal axis").select_option("time")
    answer()
    window.locator(".nbl-plot-canvas").first.focus()
    window.keyboard.press("ArrowRight")
    assert window.locator(".nbl-tip-title").first.inner_text() == "2.6 s"
    assert window.get_by_text("A: 0.02 at step 49").is_visible()
    assert window.evaluate("window.hacked") is None
    window.evaluate("window.cleanUp()")
    assert window.locator(".nbl-monitor").count() == 0
    view.close()
