"""Cells on ranks in JupyterLab in a real Chromium: widgets, tabs, the diagnosis and the debugger's prompt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.lab import Lab, browser, needs_browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [needs_browser, pytest.mark.leaks("the server, its kernel and the browser end with this test")]

START = """from notebook_launcher import Session, doctor
session = Session(2, devices="cpu", monitor=False)
session.activate()
session.execute("import time, ipywidgets as w, torch.distributed as dist; rank = dist.get_rank()")"""
MAKE = """%%ranks
s = w.IntSlider(3, description="rate")
b = w.Button(description="stop")
stop = []
b.on_click(lambda _: stop.append(1))
w.HBox([s, b])"""
WATCH = """%%ranks 0
from tqdm.notebook import tqdm
seen = [s.value]
for _ in tqdm(range(2000), desc="busy"):
    time.sleep(0.05)
    if seen[-1] != s.value:
        seen.append(s.value)
    if stop:
        break
print("saw", seen[0], seen[-1])"""
TABS = """%%ranks --display all
from IPython.display import HTML
HTML(f"<b>table {rank}</b>")"""
FAIL = """%%ranks
factor = rank * 10
1 / factor if rank else 1 / 0"""
EMPTY_BOX = "() => [...document.querySelectorAll('.jp-Stdin-input')].at(-1)?.value === ''"
SAVED = "() => !document.querySelector('.jp-mod-dirty')"
CELLS = [START, MAKE, WATCH, TABS, "doctor()", FAIL, "%debug", "session.close()"]


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("NOTEBOOK_LAUNCHER_PICTURES"):
        page.screenshot(path=Path(folder) / f"rank-cells-{name}.png")


def test_widgets_tabs_diagnosis_and_debugger_work_in_the_page(tmp_path: Path) -> None:
    with browser() as chromium, Lab(chromium, tmp_path, {"ranks.ipynb": CELLS}) as lab:
        page = lab.open("ranks.ipynb", height=1400)
        lab.run(page, 0)
        lab.run(page, 1)
        slider = lab.cell(page, 1).locator(".noUi-handle")
        slider.focus()
        page.keyboard.press("ArrowRight")
        lab.cell(page, 1).locator(".widget-readout").get_by_text("4").wait_for()

        page.keyboard.press("Control+s")
        page.wait_for_function(SAVED)
        page.reload()  # The page asks the kernel for the widgets that its notebook shows.
        slider.focus()
        page.keyboard.press("ArrowRight")
        lab.cell(page, 1).locator(".widget-readout").get_by_text("5").wait_for()

        lab.start(page, 2)
        lab.cell(page, 2).locator(".widget-hprogress, .progress").first.wait_for()
        slider.focus()
        for _ in range(6):
            page.keyboard.press("ArrowRight")
        lab.cell(page, 1).locator(".widget-readout").get_by_text("11").wait_for()
        picture(page, "widgets")
        lab.cell(page, 1).get_by_role("button", name="stop").click()
        assert lab.wait(page, 2)
        assert "saw 5 11" in "".join(lab.output(page, 2).all_inner_texts())

        lab.run(page, 3)
        table = lab.cell(page, 3).get_by_text("table 1")
        assert not table.is_visible()
        lab.cell(page, 3).locator("label").get_by_text("rank 1").click()
        table.wait_for()
        picture(page, "tabs")

        lab.run(page, 4)
        diagnosis = lab.output(page, 4)
        diagnosis.get_by_text("a launch of 2 ranks").wait_for()
        assert diagnosis.count() == 1
        picture(page, "doctor")

        lab.run(page, 5)
        lab.start(page, 6)
        for command in ("p factor", "q"):
            # The box of the answer before stays for a moment, with its text.
            page.wait_for_function(EMPTY_BOX)
            box = page.locator(".jp-Stdin-input").last
            box.fill(command)
            picture(page, f"debugger-{command[0]}")
            box.press("Enter")
            lab.cell(page, 6).get_by_text(f"(rank 0 pdb) {command}").wait_for()
        assert lab.wait(page, 6)
        assert "pdb)" in "".join(lab.output(page, 6).all_inner_texts())
        lab.run(page, 7)
