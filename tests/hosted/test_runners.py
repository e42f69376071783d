"""Programs that run notebooks without an editor: papermill, nbconvert and Voila."""

from __future__ import annotations

import subprocess

import nbformat
import pytest

from tests.hosted import HOSTED, TRAIN, installed, pause, served_page, surroundings, write_notebook

BIN = HOSTED / "runners/bin"
LATER = [TRAIN, "run = launch(train, 2, kwargs={'updates': 100})", "1 + 1", "run.result()"]
COMMANDS = {
    "papermill": ["a.ipynb", "out.ipynb", "-k", "python3"],
    "nbconvert": ["--to", "notebook", "--execute", "a.ipynb", "--output", "out.ipynb"],
}

pytestmark = [installed("runners"), pytest.mark.slow]


@pytest.mark.parametrize("program", COMMANDS)
def test_run_that_a_later_cell_waits_for_leaves_its_text_and_picture(program, tmp_path):
    write_notebook(tmp_path / "a.ipynb", LATER)
    command = [str(BIN / "python"), "-m", program, *COMMANDS[program]]
    done = subprocess.run(
        command, cwd=tmp_path, env=surroundings(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    outputs = cells[-1].outputs
    assert "trained 100" in "".join(output.get("text", "") for output in outputs)
    assert any("<img" in output.get("data", {}).get("text/html", "") for output in outputs)


@pytest.mark.leaks("the server, its kernel and the browser are ended at the end")
def test_page_of_voila_launches_from_the_panel_and_pauses(tmp_path):
    write_notebook(tmp_path / "a.ipynb", [TRAIN, "ConfigPanel(train, num_processes=2)"])
    with served_page(BIN / "python", tmp_path, "voila", "a.ipynb", "--no-browser") as page:
        page.get_by_role("button", name="Launch").first.click()
        pause(page)
