"""The versions of Colab's runtime: a kernel with a stand-in for `google.colab`, and Notebook 6.5 in Chromium."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.hosted import HOSTED, TRAIN, installed, pause, served_page, write_notebook
from tests.support.kernels import ROOT, Kernel

if TYPE_CHECKING:
    from tests.support.kernels import Outcome

PYTHON = str(HOSTED / "colab/bin/python")
VIEW = "application/vnd.jupyter.widget-view+json"
SERVED = "https://example.org/manager.js"
VERSIONS = {"notebook": "6.5.7", "ipykernel": "6.17.1", "IPython": "7.34.0", "ipywidgets": "7.7.1"}
STAND_IN = f"""
from types import SimpleNamespace
_widgets = SimpleNamespace(_installed_url={SERVED!r})
def enable_custom_widget_manager(): pass
"""
# Colab's hook is handed each display, and may change it; its page draws widgets whose metadata name a manager.
COLAB = f"""
import importlib, google.colab.output
def hook(message):
    message["content"].setdefault("metadata", {{}})["hook"] = True
    return message
get_ipython().display_pub.register_hook(hook)
print({{name: importlib.import_module(name).__version__ for name in {list(VERSIONS)}}})
"""
COMPAT = """
from notebook_launcher.compat import notebook_launcher as launch_as_accelerate
def alike():
    from notebook_launcher.compat import Accelerator
    print('alike', Accelerator().process_index)
launch_as_accelerate(alike, num_processes=2)
"""

pytestmark = [installed("colab"), pytest.mark.slow]


def executed(kernel: Kernel, code: str) -> Outcome:
    outcome = kernel.wait(kernel.start(code, allow_stdin=True))
    assert outcome.error is None, outcome.traceback
    return outcome


def metadata_of(outcome: Outcome) -> list[dict[str, object]]:
    """Return the metadata of each widget that a cell shows."""
    shown = outcome.of("display_data", "execute_result")
    return [content["metadata"] for content in shown if VIEW in content["data"]]


def test_kernel_like_that_of_colab_launches_and_its_displays_have_what_the_page_needs(tmp_path):
    (tmp_path / "google/colab").mkdir(parents=True)
    (tmp_path / "google/colab/output.py").write_text(STAND_IN)
    env = {"NOTEBOOK_LAUNCHER_RUNS": str(tmp_path), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    found = {VIEW: {"colab": {"custom_widget_manager": {"url": SERVED}}}, "hook": True}
    with Kernel(python=PYTHON, env=env) as kernel:
        assert executed(kernel, COLAB).stdout == f"{VERSIONS}\n"
        executed(kernel, TRAIN)
        outcome = executed(kernel, "notebook_launch(train, 2, kwargs={'updates': 150})")
        assert "trained 150" in outcome.stdout
        assert (outcome.result or "").startswith("Results of 2 ranks")
        assert found in metadata_of(outcome)
        assert "text/html" in outcome.displays[-1]["data"]  # the picture
        assert outcome.displays[-1]["metadata"]["hook"]
        executed(kernel, "run = launch(train, 1, monitor=False)")
        assert found in metadata_of(executed(kernel, "Monitor(run)"))
        assert metadata_of(executed(kernel, "run.stop(); ConfigPanel(train)"))
        assert "[rank 1] alike 1" in executed(kernel, COMPAT).stdout


@pytest.mark.leaks("the server, its kernel and the browser are ended at the end")
def test_notebook_6_draws_panel_and_monitor_pauses_and_keeps_a_picture(tmp_path):
    cells = [f"{TRAIN}\nConfigPanel(train, num_processes=2)", "notebook_launch(train, 2)"]
    write_notebook(tmp_path / "a.ipynb", cells)
    words = ("notebook", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--NotebookApp.token=")
    with served_page(PYTHON, tmp_path, *words, path="notebooks/a.ipynb") as page:
        page.wait_for_function("() => window.Jupyter?.notebook?.kernel?.is_connected()")
        page.evaluate("() => { Jupyter.notebook.execute_all_cells(); }")
        page.get_by_role("button", name="Launch").first.wait_for()
        pause(page)
        page.get_by_role("button", name="Stop after this step").click()
        page.locator("[data-nbl-cover] img").wait_for(state="attached")
        page.evaluate("() => { Jupyter.notebook.session.delete(); }")
