"""The panel as `marimo run` shows it: typed into, launched, and watched."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.kernels import ROOT
from tests.support.lab import browser, needs_browser

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("marimo", reason="marimo is not installed")
pytestmark = [needs_browser, pytest.mark.slow]

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    def train(lr: float = 0.1, steps: int = 3):
        from notebook_launcher import report

        for step in range(steps):
            report(step=step, loss=lr / (step + 1))
        return lr

    from notebook_launcher.widgets import ConfigPanel
    panel = ConfigPanel(train, 2)
    panel
    return (panel,)


if __name__ == "__main__":
    app.run()
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of an application that shows a panel."""
    (tmp_path / "panel.py").write_text(NOTEBOOK, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--headless", "--no-token", "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "NOTEBOOK_LAUNCHER_RUNS": "off", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "marimo", "run", "panel.py", *options],
            cwd=tmp_path,
            env=env,
            stdout=log,
            stderr=log,
        )
        try:
            for _ in range(600):  # until the server answers
                with socket.socket() as asked:
                    if not asked.connect_ex(("127.0.0.1", port)):
                        break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(0.1)
                    break
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


def test_panel_launches_and_shows_the_run_in_marimo(url):
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1200, "height": 1200})
        page.set_default_timeout(60_000)
        page.goto(url)
        panel = page.locator(".nbp-panel")
        panel.get_by_label("lr", exact=True).fill("fast")
        panel.get_by_role("alert").get_by_text("Enter a number.").wait_for()
        panel.get_by_label("lr", exact=True).fill("0.5")
        panel.locator("pre", has_text='"lr": 0.5').wait_for()
        panel.get_by_role("button", name="Launch", exact=True).click()
        panel.get_by_text("✓ train: done in").wait_for()
        panel.get_by_text("lr 0.5 · steps 3 · 2 ranks").wait_for()
        monitor = panel.locator(".nbl-monitor")
        monitor.get_by_text("returned 0.5").first.wait_for()
        panel.get_by_role("button", name="Edit").click()
        panel.get_by_label("steps", exact=True).wait_for()
