"""The panel and the monitor as a user has them: JupyterLab and Notebook 7 in a real browser.

`NOTEBOOK_LAUNCHER_PICTURES=docs/pictures` keeps the pictures that the README shows.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import Lab, browser, needs_browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page

pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(150)]

TRAIN = """
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from notebook_launcher import Accelerator

digits = load_digits()

def train(lr: float = 0.003, batch_size: int = 32, epochs: int = 2, pause: float = 0.0):
    import time
    accelerator = Accelerator()
    torch.manual_seed(0)
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                scores = model(images)
                loss = torch.nn.functional.cross_entropy(scores, labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accuracy = (scores.argmax(1) == labels).float().mean()
            accelerator.log({"loss": loss, "accuracy": accuracy})
            time.sleep(pause)
        print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    return accuracy.item()

def fail(epochs: int = 1):
    from notebook_launcher import report
    import os
    report(step=1, loss=2.0)
    if os.environ["RANK"] == "1":
        raise ValueError("rank one <b>gave up</b>")
    import torch.distributed as dist
    dist.barrier()
"""
PANEL = "from notebook_launcher.widgets import ConfigPanel\npanel = ConfigPanel(train, num_processes=2); panel"
BUSY = (
    "from notebook_launcher import notebook_launch\nnotebook_launch(train, 2, kwargs={'epochs': 10**6, 'pause': 0.01})"
)
NOTEBOOKS = {
    "panel.ipynb": [TRAIN, PANEL, "panel.results"],
    "busy.ipynb": [TRAIN, BUSY, "print('free again')"],
    "failing.ipynb": [TRAIN, PANEL.replace("train", "fail")],
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module", params=["lab", "notebook"])
def lab(request: pytest.FixtureRequest, chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(chromium, tmp_path_factory.mktemp(request.param), NOTEBOOKS, app=request.param) as opened:
        yield opened


def monitor_of(page: Page) -> Locator:
    return page.locator(".nbl-monitor").last


def picture(page: Page, what: Locator, name: str) -> None:
    folder = os.environ.get("NOTEBOOK_LAUNCHER_PICTURES")
    if folder:
        page.wait_for_timeout(500)
        what.screenshot(path=Path(folder) / name)


def ink(page: Page) -> int:
    """Return how many pixels of the first curve are drawn."""
    return int(
        page.evaluate(
            """() => {
                const canvas = [...document.querySelectorAll('.nbl-plot-canvas')].at(-1);
                if (!canvas || !canvas.width) return 0;
                const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
                return pixels.filter((value, at) => at % 4 === 3 && value > 0).length;
            }"""
        )
    )


def wait_for_more_ink(page: Page, than: int) -> int:
    # Curves are drawn where they can be seen.
    page.locator(".nbl-plot-canvas").last.scroll_into_view_if_needed()
    for _ in range(100):
        now = ink(page)
        if now > than:
            return now
        page.wait_for_timeout(100)
    pytest.fail(f"the curves do not grow beyond {than} pixels")


def wait_for_state(page: Page, state: str) -> None:
    monitor_of(page).locator(".nbl-header .nbl-state-word").get_by_text(state).wait_for()


@pytest.mark.leaks("the server, its kernel and the browser serve several tests")
def test_a_panel_is_filled_in_and_its_run_watched(lab):
    page = lab.open("panel.ipynb", height=1600)
    lab.run(page, 0)
    lab.run(page, 1)
    panel = page.locator(".nbp-panel")
    for label, value in {"Accumulation steps": "4", "epochs": "3", "pause": "0.02"}.items():
        panel.get_by_label(label, exact=True).fill(value)
    panel.get_by_text("256", exact=True).wait_for()  # 32 x 4 x 2
    panel.get_by_role("button", name="Launch", exact=True).click()
    wait_for_state(page, "running")
    first = wait_for_more_ink(page, 0)
    wait_for_more_ink(page, first)
    picture(page, page.locator(".nbp-panel"), "panel.png")

    lab.save(page, "panel.ipynb")
    page.reload()
    lab.show(page, "panel.ipynb")
    wait_for_state(page, "done")
    assert "loss" in monitor_of(page).inner_text()
    picture(page, monitor_of(page), "monitor.png")
    lab.run(page, 2)
    assert re.search(r"returned|0\.\d", lab.output(page, 2).inner_text())


@pytest.mark.leaks("the server, its kernel and the browser serve several tests")
def test_stop_is_heard_while_the_cell_is_busy(lab):
    page = lab.open("busy.ipynb", height=1600)
    lab.run(page, 0)
    lab.start(page, 1)
    wait_for_state(page, "running")
    wait_for_more_ink(page, 0)
    assert "[*]" in lab.cell(page, 1).locator(".jp-InputPrompt").first.inner_text()
    page.get_by_role("button", name="Stop after this step").last.click()
    lab.wait(page, 1)
    lab.run(page, 2)
    assert "free again" in lab.output(page, 2).inner_text()
    saved = lab.save(page, "busy.ipynb")
    kinds = [kind for output in saved.cells[1].outputs for kind in output.get("data", {})]
    assert "text/html" in kinds
    assert "application/vnd.jupyter.widget-view+json" not in kinds


@pytest.mark.leaks("the server, its kernel and the browser serve several tests")
def test_the_error_of_a_rank_is_shown(lab):
    page = lab.open("failing.ipynb", height=1600)
    lab.run(page, 0)
    lab.run(page, 1)
    page.get_by_role("button", name="Launch", exact=True).click()
    wait_for_state(page, "failed")
    shown = page.locator(".nbp-panel").inner_text()
    assert "ValueError: rank one <b>gave up</b>" in shown
    assert "Cell In[1], line" in shown or 'File "Cell In[1]"' in shown
