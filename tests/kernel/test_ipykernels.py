"""Launches on an older generation of ipykernel, in a folder that comes first on its kernel's path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.kernels import ROOT
from tests.support.warm_kernels import evaluate, run_cell, warm_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kernels import Kernel

VERSION = "6.29.5"
"""An older generation than the installed one."""
VIEW = "application/vnd.jupyter.widget-view+json"


def installed(version: str, package: str = "ipykernel", *needs: str) -> Path:
    """Install a version, and what else it needs, beside the environment's own, once; skip without a package index."""
    folder = Path(sys.prefix, "others", f"{package}-{version}")
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
        done = subprocess.run([*command, f"{package}=={version}", *needs], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"{package} {version} cannot be installed: {done.stderr.splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def module_kernel() -> Iterator[Kernel]:
    path = os.pathsep.join([str(installed(VERSION)), str(ROOT)])
    with warm_kernel(env={"PYTHONPATH": path}) as kernel:
        assert evaluate(kernel, "import ipykernel; ipykernel.__version__") == VERSION
        yield kernel


def test_ipykernel_shows_output_and_results(kernel: Kernel) -> None:
    outcome = run_cell(kernel, "def talk(): print('rank', os.environ['RANK']); return 1\nnotebook_launch(talk, 2)")
    assert {"[rank 0] rank 0", "[rank 1] rank 1"} < set(outcome.stdout.splitlines())
    assert (outcome.result or "").startswith("Results of 2 ranks")


def test_ipykernel_shows_rich_output(kernel: Kernel) -> None:
    outcome = run_cell(
        kernel,
        "def show():\n"
        "    from IPython.display import display, HTML\n"
        "    import matplotlib.pyplot as plt\n"
        "    handle = display(HTML('<b>one</b>'), display_id=True)\n"
        "    handle.update(HTML('<b>two</b>'))\n"
        "    plt.plot([1, 2])\n"
        "notebook_launch(show, 2)",
    )
    assert outcome.displays[0]["data"]["text/html"] == "<b>one</b>"
    assert outcome.updates[0]["data"]["text/html"] == "<b>two</b>"
    assert "image/png" in outcome.displays[1]["data"]


def test_ipykernel_answers_input_and_breakpoint(kernel: Kernel) -> None:
    answers = {"[rank 1] name? ": "Ada", "(rank 1 pdb) ": "c"}
    outcome = kernel.execute(
        "def ask():\n"
        "    if os.environ['RANK'] == '0': return\n"
        "    name = input('name? ')\n"
        "    breakpoint()\n"
        "    return name\n"
        "print(notebook_launch(ask, 2)[1])",
        answer_input=lambda prompt, _: answers[prompt],
    )
    assert outcome.stdout.endswith("Ada\n"), outcome


WAIT = """
def wait():
    import torch.distributed as dist
    print('up', flush=True)
    if os.environ['RANK'] == '0': dist.barrier()
    time.sleep(60)
"""


def test_ipykernel_interrupt_stops_the_run(kernel: Kernel) -> None:
    cell = kernel.start(f"{WAIT}notebook_launch(wait, 2)")
    kernel.wait(cell, until=lambda outcome: outcome.done or "up" in outcome.stdout)
    kernel.interrupt()
    outcome = kernel.wait(cell)
    assert outcome.error == "KeyboardInterrupt: wait was stopped"


def test_ipykernel_interrupt_of_an_await_stops_the_run(kernel: Kernel) -> None:
    # The loop prints once the cell awaits. Before that, an interrupt may hit IPython, which compiles each statement.
    begun = "import asyncio; asyncio.get_running_loop().call_soon(print, 'begun')"
    cell = kernel.start(f"{WAIT}run = launch(wait, 2)\n{begun}\nawait run")
    kernel.wait(cell, until=lambda outcome: outcome.done or {"up", "begun"} <= set(outcome.stdout.split()))
    kernel.interrupt()
    assert kernel.wait(cell).error is not None
    assert kernel.execute("run.wait(); print(run.state)").stdout.endswith("stopped\n")


def test_ipykernel_relays_widgets_of_ranks(kernel: Kernel) -> None:
    cell = kernel.execute(
        "def slide():\n"
        "    import ipywidgets\n"
        "    from IPython.display import display\n"
        "    slider = ipywidgets.IntSlider(3)\n"
        "    display(slider)\n"
        "    print('drawn', flush=True)\n"
        "    while slider.value == 3: time.sleep(0.01)\n"
        "    return slider.value\n"
        "run = launch(slide, 1)\n"
        "while 'drawn' not in run.logs(0) and not run.wait(0.01): pass"
    )
    (view,) = [display for display in cell.displays if VIEW in display["data"]]
    kernel.send_comm(view["data"][VIEW]["model_id"], {"method": "update", "state": {"value": 5}, "buffer_paths": []})
    assert kernel.execute("run.result()[0]").result == "5"
