"""`notebook-launcher verify`, and what its report says."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_launcher import ConfigError, VerificationReport, verify_accumulation
from notebook_launcher.command_line.program import main
from notebook_launcher.verification import VerificationRow


def test_command_prints_the_table(capsys):
    assert main(["verify", "--processes", "1", "2", "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "every weight is 2.04000"
    assert shown.count("2.04000") == 2 * 3 + 1


def test_numbers_that_are_none_are_refused_by_name():
    with pytest.raises(ConfigError, match="gradient_accumulation_steps='two' is a str; it must be a whole number"):
        verify_accumulation([2], ["two"])  # type: ignore[list-item]


def test_weight_that_differs_is_marked():
    row: dict[str, Any] = {"num_processes": 2, "gradient_accumulation_steps": 2, "micro_batch": 2, "whole": 2.04}
    good = VerificationRow(accumulated=(2.04, 2.04), by_hand=(2.04, 2.04), **row)
    bad = VerificationRow(accumulated=(2.04, 1.53), by_hand=(2.04, 2.04), **row)
    assert VerificationReport((good,))
    report = VerificationReport((good, bad))
    assert not report
    assert "1.53000..2.04000" in str(report)
    assert str(report).endswith("NOT every weight is 2.04000")
