"""`make demo`: the first tutorial in a real kernel, its table, and its exit code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        (
            'DOCUMENTED = \\"2.04000\\"',
            'DOCUMENTED = \\"3.06000\\"; LEARNING_RATE = 0.03',
            "Not 9 rows of 2.04000",
        ),
        ("import torch", "import os; os._exit(1)", "failed"),
    ],
)
def test_demo_exits_with_1_if_tutorial_fails(tmp_path, good, bad, said):
    for path in (ROOT / "notebooks").glob("*.*"):
        shutil.copy(path, tmp_path)
    notebook = tmp_path / "01_gradient_accumulation.ipynb"
    text = notebook.read_text(encoding="utf-8")
    assert good in text
    notebook.write_text(text.replace(good, bad), encoding="utf-8")
    demo = run_demo(tmp_path)
    assert (demo.returncode, said in demo.stderr) == (1, True), demo.stderr
