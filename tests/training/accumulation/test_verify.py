"""`python -m notebook_launcher verify`, and verification in a real kernel."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from notebook_launcher import ConfigError, VerificationReport, verify_accumulation
from notebook_launcher.verification import VerificationRow
from tests.support.kernels import ROOT
from tests.support.warm_kernels import evaluate, unchanged, warm_kernel


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "notebook_launcher", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_command_prints_the_table():
    outcome = run("verify", "--processes", "1", "2", "--steps", "4")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-1] == "every weight is 2.04000"
    assert outcome.stdout.count("2.04000") == 2 * 3 + 1


def test_command_fails_without_a_combination():
    outcome = run("verify", "--processes", "3")
    assert outcome.returncode == 2
    assert "num_processes=[3]" in outcome.stderr
    with pytest.raises(ConfigError, match=r"num_processes=\[3, 0\], .* no combination divides the 8 samples\. Numbers"):
        verify_accumulation([3, 0])


def test_numbers_that_are_none_are_refused_by_name():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps='two' is a str; it must be a whole number"):
        verify_accumulation([2], ["two"])  # type: ignore[list-item]


def test_command_wants_a_verb():
    assert run().returncode == 2


def test_weight_that_differs_is_marked():
    row: dict[str, Any] = {"num_processes": 2, "gradient_accumulation_steps": 2, "micro_batch": 2, "whole": 2.04}
    good = VerificationRow(accumulated=(2.04, 2.04), by_hand=(2.04, 2.04), **row)
    bad = VerificationRow(accumulated=(2.04, 1.53), by_hand=(2.04, 2.04), **row)
    assert VerificationReport((good,))
    report = VerificationReport((good, bad))
    assert not report
    assert "1.53000..2.04000" in str(report)
    assert str(report).endswith("NOT every weight is 2.04000")


def test_verification_passes_in_a_kernel():
    with warm_kernel() as kernel, unchanged(kernel):
        code = "from notebook_launcher import verify_accumulation\nbool(verify_accumulation([1, 2], [2]))"
        assert evaluate(kernel, code) is True
