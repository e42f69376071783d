"""Failed tests in `make test`, with real runs of pytest on small folders of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import everything

if TYPE_CHECKING:
    from collections.abc import Callable

UNSTEADY = """
import pathlib

def test_unsteady_{number}():
    stamp = pathlib.Path("{number}.stamp")
    was_there = stamp.exists()
    stamp.touch()
    assert was_there
"""
STEADY = "def test_steady(): pass\n"
BROKEN = "def test_broken(): raise ValueError\n"
ALONE = "import pytest\n@pytest.mark.alone\ndef test_alone(): pass\n"
LEAKING = """
import pathlib
import pytest

@pytest.fixture
def leftovers():
    yield
    stamp = pathlib.Path("leak.stamp")
    was_there = stamp.exists()
    stamp.touch()
    assert was_there

def test_leaking(leftovers): pass
"""


@pytest.fixture
def outcome_of(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run a folder with these test files as `make test` runs this project's."""

    def run(*files: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone\n    slow\n")
        (tmp_path / "tests").mkdir(exist_ok=True)
        for number, text in enumerate(files):
            (tmp_path / "tests" / f"test_{number}.py").write_text(text)
        (tmp_path / "tests" / "test_stop.py").write_text(ALONE)
        command = [sys.executable, str(Path(everything.__file__)), str(tmp_path), *options]
        # Loading every installed plugin takes 5 of 6 seconds of processor time.
        plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
        done = subprocess.run(
            command, env={**os.environ, **plugins}, capture_output=True, text=True, check=False, timeout=120
        )
        return done.returncode, done.stdout

    return run


def test_passing_tests_run_once_and_slow_ones_if_asked_for(outcome_of: Callable[..., tuple[int, str]]) -> None:
    slow = "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\n"
    status, output = outcome_of(STEADY, slow)
    assert status == 0
    assert output.count("==> ") == 3
    assert output.count("1 passed") == 2
    assert "==> left out: the slow tests, which `make test SLOW=1` runs" in output
    status, output = outcome_of(STEADY, slow, options=("--slow",))
    assert status == 0
    assert "2 passed" in output
    assert "left out" not in output


def test_test_and_leftover_that_do_not_fail_again_are_named_as_unsteady(
    outcome_of: Callable[..., tuple[int, str]],
) -> None:
    status, output = outcome_of(LEAKING, UNSTEADY.format(number=1))
    assert status == 0
    assert "==> tests that failed, again and alone: 2" in output
    unsteady = "tests/test_0.py::test_leaking, tests/test_1.py::test_unsteady_1"
    assert output.endswith(f"==> unsteady, failed once and passed alone: {unsteady}\n")


def test_test_that_fails_twice_fails_the_run(outcome_of: Callable[..., tuple[int, str]]) -> None:
    status, output = outcome_of(BROKEN, UNSTEADY.format(number=1))
    assert status == 1
    assert "==> tests that failed, again and alone: 2" in output
    assert "unsteady, failed once" not in output


def test_many_failures_do_not_run_again(outcome_of: Callable[..., tuple[int, str]]) -> None:
    status, output = outcome_of(*(UNSTEADY.format(number=number) for number in range(everything.MAX_AGAIN + 1)))
    assert status == 1
    assert "again and alone" not in output


def test_file_that_cannot_be_read_does_not_run_again(outcome_of: Callable[..., tuple[int, str]]) -> None:
    status, output = outcome_of("import a_module_that_is_not_there\n")
    assert status == 1
    assert "again and alone" not in output
