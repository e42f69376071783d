"""The front page tells the truth: its example runs and prints what it says, its links lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.kernels import ROOT
from tests.scenes import warm_kernel

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_shows() -> None:
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", README, re.DOTALL)[:2]
    with warm_kernel() as kernel:
        outcome = kernel.execute(code, timeout=60)
        assert outcome.error is None, outcome.traceback
        assert kernel.execute("print(len(results), sorted(results[0]))").stdout == "2 ['bias', 'weight']\n"

    def without_measurements(text: str) -> list[str]:
        return sorted(re.sub(r"\d+ threads?|\d+\.\d\d s", "_", line) for line in text.splitlines())

    assert without_measurements(outcome.stdout) == without_measurements(shown)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_example_and_its_output_come_early() -> None:
    assert README[: README.index("done in")].count("\n") < 40
    assert README.count("\n") <= 160
