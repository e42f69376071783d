"""The table of kept runs, and runs side by side, in a real browser, with a fake model."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint, RunSnapshot
from notebook_launcher.widgets.assets import STATIC, join_modules
from notebook_launcher.widgets.runs.comparison import ComparedRun, Comparison
from notebook_launcher.widgets.runs.comparison_view import ComparisonPage, ComparisonView
from tests.support.made_up_run import Reader
from tests.support.monitor_page import LISTENERS, SETTLE, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

EVIL = "<img src=x onerror='window.hacked=1'>"


def row(number: int, name: str = "", notes: str = "") -> dict[str, Any]:
    name = name or f"run {number}"
    tag = "even" if number % 2 == 0 else "odd"
    cells = {"name": name, "tags": tag, "when": f"2026-11-22 0{number}:00", "time": f"{10 - number} s", "notes": notes}
    order = {"when": number, "time": 10 - number, "disk": 1_500_000}
    return {
        "id": f"2026-{number}",
        "name": name,
        "tags": [tag],
        "cells": cells,
        "order": order,
        "searched": f"{name} loss 0.5",
    }


def columns(*keys: str) -> list[dict[str, Any]]:
    return [{"key": key, "title": key, "is_number": key == "time"} for key in keys]


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    rows = [row(number) for number in range(4)] + [row(4, notes=EVIL, name="best")]
    known = columns("name", "tags", "when", "time", "notes")
    traits = {"rows": rows, "columns": known, "caption": "5 runs in /runs", "answer": "", "compared": ""}
    load(window, (STATIC / "runs.css").read_text(encoding="utf-8"), join_modules(STATIC / "runs.js"), traits)
    assert window.evaluate(LISTENERS) == 5
    yield window
    assert window.evaluate("window.hacked") is None
    window.evaluate("cleanups.pop()()")
    assert (window.evaluate(LISTENERS), window.locator(".nbr-runs").count()) == (0, 0)


def names(page: Page) -> list[str]:
    return page.locator("tbody td:nth-child(2)").all_inner_texts()


def test_runs_are_filtered_and_sorted(page):
    assert names(page) == ["best", "run 3", "run 2", "run 1", "run 0"]
    page.get_by_role("button", name="time").click()
    assert names(page) == ["run 0", "run 1", "run 2", "run 3", "best"]
    page.get_by_role("button", name="time").click()
    assert names(page)[0] == "best"
    page.get_by_label("Tag").select_option("even")
    assert names(page) == ["best", "run 2", "run 0"]
    page.get_by_label("Filter runs").fill("RUN loss")
    assert names(page) == ["run 2", "run 0"]
    assert page.locator(".nbr-caption").inner_text() == "2 shown of 5 runs in /runs"


def test_deletion_asks_first(page):
    page.get_by_label("Select run 1").check()
    page.get_by_label("Select run 3").check()
    page.get_by_role("button", name="Delete").click()
    assert page.get_by_role("alert").inner_text() == "Delete these 2 runs from the disk (3.0 MB)? It cannot be undone."
    page.get_by_role("button", name="Keep").click()
    assert page.evaluate("model.sent") == []
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete 2").click()
    (message,) = page.evaluate("model.sent")
    assert (message["type"], sorted(message["ids"])) == ("delete", ["2026-1", "2026-3"])
    page.evaluate("model.change('rows', model.traits.rows.filter(({ id }) => !['2026-1', '2026-3'].includes(id)))")
    page.evaluate("model.change('answer', '2 deleted, 3 MB')")
    assert names(page) == ["best", "run 2", "run 0"]
    assert page.locator(".nbr-caption").inner_text() == "5 runs in /runs · 2 deleted, 3 MB"
    assert page.get_by_role("button", name="Delete").count() == 0


def test_one_run_is_edited_and_several_are_compared(page):
    page.get_by_label("Select best").check()
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("notes").input_value() == EVIL
    page.get_by_label("tags").fill("a, b")
    page.get_by_role("button", name="Save").click()
    edits = {"type": "edit", "ids": ["2026-4"], "name": "best", "tags": "a, b", "notes": EVIL}
    assert page.evaluate("model.sent") == [edits]
    page.get_by_label("Select all shown runs").check()
    assert page.get_by_role("button", name="Edit").is_disabled()
    page.get_by_role("button", name="Compare").click()
    assert len(page.evaluate("model.sent[1].ids")) == 5
    page.evaluate("model.change('compared', '<b>5 runs compared</b>')")
    page.evaluate("model.change('compared', '<b>2 runs compared</b>')")
    assert page.locator(".nbl-monitor").all_inner_texts() == ["2 runs compared"]
    assert page.evaluate("model.sent.slice(2).map(({ type }) => type)") == ["hello", "hello"]  # It asks for its plots.


def test_column_of_an_argument_is_sorted_by_its_number(page):
    rows = [row(number) for number in range(3)]
    for each, words in zip(rows, ("0.1", "1e-3", "0.02"), strict=True):
        each["cells"]["lr"], each["order"]["lr"] = words, float(words)
    page.evaluate("columns => { model.traits.columns = columns; }", columns("name", "lr"))
    page.evaluate("rows => model.change('rows', rows)", rows)
    page.get_by_role("button", name="lr").click()
    assert page.locator("tbody td:nth-child(3)").all_inner_texts() == ["1e-3", "0.02", "0.1"]


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
    runs = []
    for name, read in (("one", reader(0.0, 5000)), (EVIL, reader(0.25, 50))):
        runs.append(ComparedRun(snapshot(name), Curves(), read))
        runs[-1].curves.fold(read.metrics)
    return Comparison(runs, ["loss", "acc"])


def test_runs_are_lines_of_live_plots_with_their_last_values(window: Page, comparison: Comparison) -> None:
    view = ComparisonView(comparison)
    sent: list[Any] = []
    answers = ComparisonPage(comparison, sent.append)
    load(window, view._css, view._esm, {"tables": view.tables})

    def answer() -> None:
        for asked in window.evaluate("model.sent.splice(0)"):
            answers.receive(asked)
        for message in sent:
            window.evaluate("message => model.fire('msg:custom', message)", message)
        sent.clear()
        window.evaluate(SETTLE)

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
    window.evaluate("cleanups.pop()()")
    assert window.locator(".nbl-monitor").count() == 0
    view.close()
