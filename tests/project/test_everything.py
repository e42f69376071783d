"""Failed tests in `make test`, with real runs of pytest on small folders of tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


SLOW = "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\n"
NAMES = "tests/test_0.py::test_leaking, tests/test_1.py::test_unsteady_1"
UNSTEADY_AGAIN = f"==> tests that failed, again and alone: 2|==> unsteady, failed once and passed alone: {NAMES}\n"
LEFT_OUT = "==> left out: the slow tests, which `make test SLOW=1` runs"


@pytest.mark.parametrize(
    ("files", "options", "status", "said", "unsaid"),
    [
        ((STEADY, SLOW), (), 0, f"1 passed|1 passed|{LEFT_OUT}", "again and alone"),
        ((STEADY, SLOW), ("--slow",), 0, "2 passed", "left out"),
        ((LEAKING, UNSTEADY.format(number=1)), (), 0, UNSTEADY_AGAIN, "unsteady_0"),
        ((BROKEN, UNSTEADY.format(number=1)), (), 1, "==> tests that failed, again and alone: 2", "unsteady, failed"),
        ([UNSTEADY.format(number=number) for number in range(everything.MAX_AGAIN + 1)], (), 1, "", "again and alone"),
        (("import a_module_that_is_not_there\n",), (), 1, "", "again and alone"),
    ],
    ids=["passing", "slow", "unsteady", "failing twice", "many failures", "unreadable file"],
)
def test_failed_tests_run_again_and_alone(
    outcome_of: Callable[..., tuple[int, str]], files: Any, options: Any, status: int, said: str, unsaid: str
) -> None:
    """Texts that are said one after the other are separated by a bar."""
    found, output = outcome_of(*files, options=options)
    assert found == status
    assert re.search(".*".join(map(re.escape, said.split("|"))), output, re.DOTALL), output
    assert unsaid not in output
