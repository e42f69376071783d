"""The versions of Kaggle's image, and its "Save & Run All": papermill executes the notebook, nbconvert makes a page."""

from __future__ import annotations

import subprocess

import nbformat
import pytest

from tests.hosted import HOSTED, TRAIN, installed, surroundings, write_notebook

PYTHON = HOSTED / "kaggle/bin/python"
VERSIONS = {"ipykernel": "6.17.1", "ipython": "7.34.0", "ipywidgets": "8.1.5", "nbconvert": "6.4.5"}
CELLS = [
    f"import importlib.metadata\nprint({{name: importlib.metadata.version(name) for name in {list(VERSIONS)}}})",
    TRAIN,
    "notebook_launch(train, 2, kwargs={'updates': 100})",
    "run = launch(train, 2, kwargs={'updates': 100})",
    "run.result()",
    "ConfigPanel(train, num_processes=2)",
]

pytestmark = [installed("kaggle"), pytest.mark.slow]


def test_batch_run_like_that_of_kaggle_keeps_text_results_and_pictures(tmp_path):
    (tmp_path / "ipython/profile_default").mkdir(parents=True)
    config = tmp_path / "ipython/profile_default/ipython_config.py"
    config.write_text("get_config().IPKernelApp.matplotlib = 'inline'\n")
    write_notebook(tmp_path / "a.ipynb", CELLS)
    env = {**surroundings(tmp_path), "KAGGLE_KERNEL_RUN_TYPE": "Batch"}

    def run(*words):
        command = [str(PYTHON), "-m", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    run("papermill", "a.ipynb", "out.ipynb", "-k", "python3")
    versions, _, blocking, _, later, panel = (
        cell.outputs for cell in nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    )
    assert versions[0].text == f"{VERSIONS}\n"
    for outputs in (blocking, later):
        assert "trained 100" in "".join(output.get("text", "") for output in outputs)
        assert any("<img" in output.get("data", {}).get("text/html", "") for output in outputs)
        assert any("Results of 2 ranks" in output.get("data", {}).get("text/plain", "") for output in outputs)
    assert any("notebook_launch(train, 2)" in output.get("data", {}).get("text/plain", "") for output in panel)
    run("nbconvert", "--to", "html", "out.ipynb")
    page = (tmp_path / "out.html").read_text()
    assert page.count("trained 100") >= 2
    assert "Results of 2 ranks" in page
