"""The table of kept runs in a real browser, with a fake model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher.widgets.assets import STATIC, join_modules
from tests.support.lab import needs_browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

pytestmark = needs_browser

EVIL = "<img src=x onerror='window.hacked=1'>"
HARNESS = """
<!doctype html><meta charset="utf-8"><style>%(css)s</style><body><div id="root"></div>
<script type="module">
const url = URL.createObjectURL(new Blob([%(module)s], { type: "text/javascript" }));
const widget = (await import(url)).default;
const calls = new Map();
window.model = {
  sent: [], traits: %(traits)s,
  get(name) { return this.traits[name]; },
  on(name, call) { calls.set(name, call); },
  off(name) { calls.delete(name); },
  send(message) { this.sent.push(message); },
  change(name, value) { this.traits[name] = value; calls.get(`change:${name}`)(); },
};
window.cleanUp = widget.render({ model, el: document.getElementById("root") });
window.listening = () => calls.size;
</script>
"""


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
    traits = json.dumps({"rows": rows, "columns": known, "caption": "5 runs in /runs", "answer": "", "compared": ""})
    module = json.dumps(join_modules(STATIC / "runs.js"))
    parts = {"css": (STATIC / "runs.css").read_text(encoding="utf-8"), "module": module, "traits": traits}
    window.goto("about:blank")
    window.set_content(HARNESS % {name: part.replace("</", "<\\/") for name, part in parts.items()})
    window.wait_for_function("window.listening?.() === 5")
    yield window
    assert window.evaluate("window.hacked") is None
    window.evaluate("window.cleanUp()")
    assert window.evaluate("[window.listening(), document.querySelectorAll('.nbr-runs').length]") == [0, 0]


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
