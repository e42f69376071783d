"""A detached run in JupyterLab: started, left alone by a killed server, and found, watched and stopped from another."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import attach
from tests.detached.hosts import host_of
from tests.support.lab import Lab, browser, needs_browser
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

pytestmark = [
    needs_browser,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.leaks("the servers, their kernels and the browser end with this test"),
]

START = """from notebook_launcher import launch

def train():
    import time
    from notebook_launcher import report
    for step in range(10**6):
        report(step=step, loss=1 / (step + 1))
        time.sleep(0.02)

run = launch(train, 2, detached=True)"""
COME_BACK = """from notebook_launcher import attach
run = attach()"""
END = """try:
    run.result()
except Exception as error:
    print(type(error).__name__, run.state)"""


def step_of(page: Page) -> int:
    """Return the step of rank 0 in the monitor's table."""
    cell = page.get_by_role("region", name="Table of ranks").locator("tbody td:nth-child(3)").first
    return int(re.sub(r"\D", "", cell.inner_text()) or 0)


def wait_for_state(page: Page, state: str) -> None:
    page.locator(".nbl-monitor").last.locator(".nbl-header .nbl-state-word").get_by_text(state).wait_for()


def test_a_run_outlives_the_jupyter_server_and_is_watched_and_stopped_from_another(home: Path, tmp_path: Path) -> None:
    with browser() as chromium:
        with Lab(chromium, tmp_path / "first", {"start.ipynb": [START]}) as lab:
            page = lab.open("start.ipynb")
            lab.run(page, 0)
            wait_for_state(page, "running")
            lab.kill()
        run = attach(show=False)
        host = host_of(run)
        reached = run.metrics[-1].step or 0
        until(lambda: (run.metrics[-1].step or 0) > reached)
        with Lab(chromium, tmp_path / "second", {"come_back.ipynb": [COME_BACK, END]}) as lab:
            page = lab.open("come_back.ipynb", height=1600)
            lab.run(page, 0)
            wait_for_state(page, "running")
            before = until(lambda: step_of(page))
            until(lambda: step_of(page) > before)
            page.get_by_role("button", name="Interrupt", exact=True).last.click()
            wait_for_state(page, "stopped")
            lab.run(page, 1)
            assert "RunStoppedError stopped" in lab.output(page, 1).inner_text()
    assert run.state == "stopped"
    host.wait(60)
