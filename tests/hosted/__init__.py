"""Front ends that this project's own environment does not have: `make hosted-check` installs them in `.cache`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.support.kernels import ROOT
from tests.support.lab import PATIENCE_MS, browser, write_notebook
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page

__all__ = ["HOSTED", "TRAIN", "installed", "pause", "served_page", "surroundings", "write_notebook"]

HOSTED = ROOT / ".cache" / "hosted"
TRAIN = """
import torch
from notebook_launcher import Accelerator, ConfigPanel, Monitor, launch, notebook_launch

def train(updates: int = 10**6, pause: float = 0.02):
    import time
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    for _ in range(updates):
        with accelerator.accumulate(model):
            loss = model(torch.rand(8, 4)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss})
        time.sleep(pause)
    print("trained", updates)
    return updates
"""


def installed(name: str) -> pytest.MarkDecorator:
    """Return the mark by which a test skips where an environment of `make hosted-check` is missing."""
    missing = not (HOSTED / name / "installed").exists()
    return pytest.mark.skipif(missing, reason="`make hosted-check` installs what this test needs")


def surroundings(folder: Path) -> dict[str, str]:
    """Return an environment in which programs keep their files in a folder and find the package."""
    names = {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_CONFIG_DIR": "config", "HOME": "home"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(folder / path) for name, path in names.items()}}


@contextlib.contextmanager
def served_page(python: str | Path, folder: Path, *words: str, path: str = "") -> Iterator[Page]:
    """Run a module of an environment that serves a folder, and open a page of it in a browser."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{(port := free.getsockname()[1])}/{path}"
    command = [str(python), "-m", *words, f"--port={port}"]
    env = surroundings(folder)
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)

    def answers() -> bool:
        assert server.poll() is None, (folder / "server.log").read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(address) as page:
            return bool(page.read())
        return False

    try:
        until(answers)
        with browser() as chromium:
            page = chromium.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.set_viewport_size({"width": 1200, "height": 1600})
            page.goto(address)
            yield page
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def pause(page: Page) -> None:
    """Pause the run that a monitor shows, and wait until the monitor shows that it is paused."""
    monitor = page.locator(".nbl-monitor").last
    monitor.get_by_role("button", name="Pause", exact=True).click()
    monitor.locator(".nbl-header .nbl-state-word").get_by_text("paused").wait_for()
