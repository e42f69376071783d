"""README: its examples run and print the shown output, and its links exist."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support import pages
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_example_prints_the_shown_output_and_its_failure_the_cause(tmp_path: Path) -> None:
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", README, re.DOTALL)[:2]
    _, failure, *_ = pages.blocks(README)
    with pages.reader(tmp_path) as kernel:
        outcome = kernel.execute(code)
        assert outcome.error is None, outcome.traceback
        pages.run(failure, kernel)
        assert kernel.execute("print(len(results), sorted(results[0]))").stdout == "2 ['bias', 'weight']\n"

    def without_measurements(text: str) -> list[str]:
        return sorted(re.sub(r"\d+ threads?|\d+(\.\d+)? m?s", "_", line) for line in text.splitlines())

    *before, last = shown.splitlines()
    put_out = without_measurements(outcome.stdout)
    assert [line for line in put_out if "done in" not in line] == without_measurements("\n".join(before))
    # On a busy machine the run takes more than a second: then its last line is in its record.
    records = "\n".join(display["data"]["text/plain"] for display in outcome.displays)
    assert re.search(r"train.*: done", records) or without_measurements(last)[0] in put_out


# Names that the page leaves to the reader, and options that this machine may lack.
GIVEN = """
import torch
from notebook_launcher import *
path = "data"
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
loader = torch.utils.data.DataLoader([(torch.ones(2), torch.ones(1))] * 16, batch_size=2)
loss_function = torch.nn.functional.mse_loss
"""
LATER = """
def load(path): return path
def train(lr=0.1, epochs=1):
    import time
    report(step=0, loss=lr)
    time.sleep(1)  # long enough to have stacks
"""
FILLED_IN = {
    "args=(...)": "args=(model, optimizer, scheduler, loader, loss_function)",
    "devices=[1, 3]": 'devices="cpu"',
    '16, engine=SSH(["gpu1", "gpu2"])': "2, engine=Commands([[], []])",
}


@pytest.mark.slow
def test_readme_training_and_interface_examples_run(tmp_path):
    _, _, training, interface = (block.code for block in pages.blocks(README))
    with pages.reader(tmp_path) as kernel:
        for code in (GIVEN, _filled_in(training), LATER, _filled_in(interface)):
            outcome = kernel.execute(code)
            assert outcome.error is None, f"{code}\n{outcome.traceback}"
            assert "Warning" not in outcome.stderr
        assert (tmp_path / "checkpoint" / "checkpoint_manifest.json").is_file()


def _filled_in(code: str) -> str:
    for words, instead in FILLED_IN.items():
        code = code.replace(words, instead)
    return code


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:\]\(|src=\")([^)#:\"]+)[)\"]", README))))
def test_readme_links_exist(path: str) -> None:
    assert (ROOT / path).exists()
