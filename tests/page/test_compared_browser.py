"""Runs side by side in a real browser: the plots of the monitor, with a line for each run."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint, RunSnapshot
from notebook_launcher.widgets.runs.comparison import ComparedRun, Comparison
from notebook_launcher.widgets.runs.comparison_view import ComparisonPage, ComparisonView
from tests.support.lab import needs_browser
from tests.support.made_up_run import Reader

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


def reader(shift: float, num_steps: int) -> Reader:
    values = [{"loss": shift + 1 / (step + 1), "acc": 0.5 + shift} for step in range(num_steps)]
    points = [MetricPoint(rank=0, step=step, time=step / 10, values=each) for step, each in enumerate(values)]
    return Reader(metrics=points)


@pytest.fixture
def comparison() -> Comparison:
    """Two runs; of the first one a plot has a part of the points."""
    runs = [
        ComparedRun(snapshot("one"), Curves(), reader(0.0, 5000)),
        ComparedRun(snapshot(EVIL), Curves(), reader(0.25, 50)),
    ]
    for run in runs:
        run.curves.fold(run.reader.metrics)
    return Comparison(runs, ["loss", "acc"])


def test_runs_are_lines_of_live_plots_with_their_last_values(window: Page, comparison: Comparison) -> None:
    view = ComparisonView(comparison)
    sent: list[Any] = []
    answers = ComparisonPage(comparison, sent.append)
    parts = {"css": view._css, "module": json.dumps(view._esm), "tables": json.dumps(view.tables)}
    window.goto("about:blank")
    window.set_content(HARNESS % {name: part.replace("</", "<\\/") for name, part in parts.items()})
    window.wait_for_function("window.model?.sent.length")

    def answer() -> None:
        for asked in window.evaluate("model.sent.splice(0)"):
            answers.receive(asked)
        for message in sent:
            window.evaluate("message => model.fire(message)", message)
        sent.clear()
        window.evaluate(FRAMES)

    answer()
    assert window.locator(".nbl-plot-name").all_inner_texts() == ["loss", "acc"]
    assert window.locator(".nbl-parts").first.inner_text().split("\n") == ["A: one 2e-4", f"B: {EVIL} 0.27"]
    assert window.locator(".nbl-plot-canvas canvas").count() == 2
    with window.expect_download() as download:
        window.get_by_role("button", name="CSV").click()
        answer()
    rows = download.value.path().read_text().splitlines()
    assert (len(rows), rows[0], rows[-1]) == (
        1 + 2 * 5050,
        "run,metric,rank,step,seconds,value",
        "B,loss,0,49,4.9,0.27",
    )
    axis, plot = window.get_by_label("Horizontal axis"), window.locator(".nbl-plot-canvas").first

    def read(key: str) -> str:
        plot.press(key)
        answer()
        return window.locator(".nbl-tip-title").first.inner_text()

    axis.select_option("time")
    answer()
    assert read("ArrowRight") == "4 min 22 s"
    axis.select_option("step")
    answer()
    for _ in range(8):
        read("+")
    steps = [int(read("ArrowLeft").removeprefix("step ").replace(",", "")) for _ in range(12)]
    assert {before - after for before, after in itertools.pairwise(steps)} == {0, 1}
    assert window.get_by_text("A: 2e-4 at step 4,999").is_visible()
    assert window.evaluate("window.hacked") is None
    window.evaluate("window.cleanUp()")
    assert window.locator(".nbl-monitor").count() == 0
    view.close()
