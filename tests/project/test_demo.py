"""`make demo`: the first tutorial in a real kernel, its table, and its exit code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_demo(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "demo.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=55
    )


@pytest.mark.slow
def test_demo_prints_documented_weight_for_every_combination():
    demo = run_demo(ROOT / "notebooks")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    table = demo.stdout[demo.stdout.rindex("processes  accumulation") :].splitlines()[1:10]
    combinations = [tuple(int(word) for word in row.split()[:2]) for row in table]
    assert combinations == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
    assert {word for row in table for word in row.split()[2:]} == {"2.04000"}


OTHER_TABLE = """
print("processes  accumulation     with  without  documented")
for processes, steps in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]:
    print(processes, steps, "3.06000  3.06000  2.04000")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "said"), [(OTHER_TABLE, "Not 9 rows of 2.04000"), ("import os; os._exit(1)", "failed")]
)
def test_demo_exits_with_1_if_tutorial_fails_or_prints_other_weights(tmp_path, source, said):
    shutil.copy(ROOT / "notebooks/demo.py", tmp_path)
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["table"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "01_gradient_accumulation.ipynb")
    demo = run_demo(tmp_path)
    assert (demo.returncode, said in demo.stderr) == (1, True), demo.stderr
