"""`notebook-launcher check`: its table, its report, its limits; here without a GPU."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.gpu_check.catalogue import ALL_CHECKS, find_check
from notebook_launcher.gpu_check.check_kind import Check
from notebook_launcher.gpu_check.check_program import PROVES_NOTHING, check, conclude
from notebook_launcher.gpu_check.check_report import hide_names
from notebook_launcher.gpu_check.check_run import Outcome, run_one
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def outcome(state: str, *, decides: bool = True) -> Outcome:
    return Outcome(name="any", decides=decides, state=state, seconds=0.0, reason="")


@pytest.mark.parametrize(
    ("outcomes", "num_gpus", "complete", "words"),
    [
        ([outcome("PASS")], 0, True, PROVES_NOTHING),
        ([outcome("PASS"), outcome("FAIL", decides=False)], 1, True, r"passed on 1 GPU\.$"),
        ([outcome("PASS")], 2, False, "nothing may be claimed"),
        ([outcome("PASS"), outcome("SKIP")], 2, True, "nothing may be claimed"),
        ([outcome("PASS"), outcome("FAIL")], 2, True, "please report it"),
    ],
)
def test_conclusion_claims_only_what_was_tried(
    *, outcomes: list[Outcome], num_gpus: int, complete: bool, words: str
) -> None:
    assert re.search(words, conclude(outcomes, num_gpus, complete=complete))


def test_checks_that_decide_come_first_and_names_are_unique() -> None:
    decides = [one.decides for one in ALL_CHECKS]
    assert decides == sorted(decides, reverse=True)
    assert len({one.name for one in ALL_CHECKS}) == len(ALL_CHECKS)
    assert find_check(ALL_CHECKS[0].name) is ALL_CHECKS[0]
    with pytest.raises(LookupError, match="there is no check 'nothing'"):
        find_check("nothing")


def test_check_that_cannot_be_made_is_skipped_with_its_reason() -> None:
    made = run_one(Check(name="x", run=lambda _: None, num_gpus=2, on_cpu=False), 0)
    assert (made.state, made.reason) == ("SKIP", "needs a GPU")
    made = run_one(Check(name="x", run=lambda _: None, num_gpus=2), 1)
    assert (made.state, made.reason) == ("SKIP", "needs 2 GPUs")


@pytest.mark.parametrize(
    ("program", "limit", "state", "reason"),
    [
        (
            "import json; open(sys.argv[3], 'w').write(json.dumps(['PASS', sys.argv[1] + sys.argv[2]]))",
            50,
            "PASS",
            "x0",
        ),
        ("print('last words', flush=True); os.abort()", 50, "FAIL", "its process ended with status -6"),
        ("print('last words', flush=True); time.sleep(60)", 0.5, "FAIL", "not done after 0.5 s"),
    ],
)
def test_outcome_of_a_process_that_ends_in_any_way(program: str, limit: float, state: str, reason: str) -> None:
    command = [sys.executable, "-c", "import os, sys, time; " + program]
    made = run_one(Check(name="x", run=lambda _: None, limit=limit), 0, command)
    assert (made.state, made.reason) == (state, reason)
    assert ("last words" in made.output) is (state == "FAIL")


def test_report_hides_names() -> None:
    text = f"GPU-12345678-aaaa at /home/jane/data on {socket.gethostname()}x, /dev/shm/nccl-1, 3/4"
    hidden = hide_names(text)
    assert "12345678" not in hidden
    assert "jane" not in hidden
    assert "/dev/shm/nccl-1" in hidden
    assert "3/4" in hidden
    assert hide_names(text) == hidden
    if len(socket.gethostname()) > 3:
        assert socket.gethostname() not in hidden


def test_words_choose_checks_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(only=["Hooks"], names_only=True) == 0
    assert capsys.readouterr().out == "  communication hooks\n"
    with pytest.raises(LookupError, match=r"--only nothing: no check has such a name\. --list prints all names"):
        check(only=["nothing"])


def test_command_makes_checks_in_their_cpu_forms_and_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "notebook_launcher", "check", "--cpu", "--folder", str(tmp_path)]
    only = ["--only", "two ranks on one device", "fork of", "overflow"]
    done = subprocess.run([*command, *only], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0] == PROVES_NOTHING
    assert lines[-2] == f"2 passed, 0 failed, 1 skipped. {PROVES_NOTHING}"
    (file,) = tmp_path.glob("gpu-check-*.json")
    report = json.loads(file.read_text())
    assert sorted(one["state"] for one in report["checks"]) == ["PASS", "PASS", "SKIP"]
    assert report["facts"]["checked_gpus"] == 0
    assert report["facts"]["torch"]["version"]


@pytest.mark.slow
def test_checks_that_decide_pass_without_a_gpu(tmp_path: Path) -> None:
    """Some of them: all 43 take four minutes, and nearly all of what their CPU forms do has tests of its own."""
    command = [sys.executable, "-m", "notebook_launcher", "check", "--cpu", "--folder", str(tmp_path)]
    only = ["ragged and weighted", "stop while a rank lags", "while a peer waits", "all dtypes", "sharded model"]
    done = subprocess.run(
        [*command, "--only", *only], cwd=ROOT, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"6 passed, 0 failed, 0 skipped. {PROVES_NOTHING}" in done.stdout
