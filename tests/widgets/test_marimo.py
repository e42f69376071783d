"""A page of `marimo run`: results, and a panel whose cell is run again during its run."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.hosted import TRAIN, pause, served_page

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import marimo
app = marimo.App()

@app.cell
def _():
    import marimo
{train}
    again = marimo.ui.button(label="Again")
    again
    return (ConfigPanel, again, notebook_launch, train)

@app.cell
def _(notebook_launch, train):
    notebook_launch(train, 2, kwargs={{"updates": 50}})
    return

@app.cell
def _(ConfigPanel, again, train):
    again.value
    ConfigPanel(train, num_processes=2)
    return
"""


@pytest.mark.skipif(importlib.util.find_spec("marimo") is None, reason="marimo is not installed")
@pytest.mark.slow
@pytest.mark.leaks("the server and the browser are ended at the end")
def test_page_of_marimo_shows_results_and_a_panel_that_keeps_its_run_when_its_cell_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PROGRAM.format(train=textwrap.indent(TRAIN, "    ")))
    with served_page(sys.executable, tmp_path, "marimo", "run", "a.py", "--headless", "--no-token") as page:
        page.get_by_text("Results of 2 ranks").first.wait_for()
        page.get_by_role("button", name="Launch").click()
        pause(page)
        page.get_by_role("button", name="Launch").evaluate("(button) => { button.dataset.old = 'yes'; }")
        page.get_by_role("button", name="Again").click()
        page.locator("[data-old]").wait_for(state="detached")
        page.get_by_text("is running on 2 ranks").wait_for()
        page.locator(".nbl-header .nbl-state-word").get_by_text("paused").wait_for()
        page.get_by_role("button", name="Resume", exact=True).click()
        page.locator(".nbl-header .nbl-state-word").get_by_text("running").wait_for()
        page.get_by_role("button", name="Stop", exact=True).first.click()
        page.get_by_text("stopped after").first.wait_for()
