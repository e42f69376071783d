"""`notebook-launcher check`: its table, its report, its limits; here without a GPU."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebook_launcher import ConfigError
from notebook_launcher.gpu_check import check_program
from notebook_launcher.gpu_check.check_program import (
    PROVES_NOTHING,
    Outcome,
    check,
    collect_facts,
    hide_names,
    last_lines,
    main,
    run_one,
    write_report,
)
from notebook_launcher.gpu_check.checks import CHECKS, Check, Hardware
from tests.support.kernels import ROOT


def outcome(state: str, said: str = "") -> Outcome:
    return Outcome(name="any", state=state, seconds=0.0, reason=said, output=said)


@pytest.mark.parametrize(
    ("states", "num_gpus", "complete", "words"),
    [
        (["PASS"], 0, True, PROVES_NOTHING),
        (["PASS"], 1, True, r"passed on 1 GPU\.$"),
        (["PASS"], 2, False, "nothing may be claimed"),
        (["PASS", "SKIP"], 2, True, "nothing may be claimed"),
        (["PASS", "FAIL"], 2, True, "please report it"),
    ],
)
def test_conclusion_claims_only_what_was_tried(*, states: list[str], num_gpus: int, complete: bool, words: str) -> None:
    assert re.search(words, last_lines([*map(outcome, states)], Hardware(num_gpus), complete=complete))


def test_check_needs_gpus_of_its_own_unless_its_ranks_can_share_one() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)

    def asked(hardware: Hardware, **options: Any) -> str:
        return Check(name="x", run=lambda _: None, num_gpus=2, **options).why_not(hardware)

    made = run_one(Check(name="x", run=lambda _: None, on_cpu=False), Hardware(0))
    assert (made.state, made.reason) == ("SKIP", "needs a GPU")
    assert asked(Hardware(1)) == asked(Hardware(1, shares=True), can_share=False) == "needs 2 GPUs"
    assert not asked(Hardware(1, shares=True))
    assert [Hardware(num, shares=True).ranks(2)["devices"] for num in range(3)] == ["cpu", [0], [0, 1]]


@pytest.mark.parametrize(("shares", "told"), [(True, "1"), (False, "None")])
def test_process_of_a_check_lets_nccl_share_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shares: bool, told: str
) -> None:
    monkeypatch.setattr(os, "environ", {})
    tell = Check(name="x", run=lambda _: str(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE")))
    main([tell], ["x", "1", str(shares), str(tmp_path / "outcome")])
    assert json.loads((tmp_path / "outcome").read_text()) == ["PASS", told]


@pytest.mark.parametrize(
    ("program", "limit", "state", "reason"),
    [
        ("import json; open(sys.argv[4], 'w').write(json.dumps(['PASS', ' '.join(sys.argv[1:4])]))",
         50, "PASS", "x 0 False"),
        ("print('last words', flush=True); os.abort()", 50, "FAIL", "its process ended with status -6"),
        ("print('last words', flush=True); time.sleep(60)", 0.5, "FAIL", "not done after 0.5 s"),
    ],
)  # fmt: skip
def test_outcome_follows_from_the_end_of_the_process(program: str, limit: float, state: str, reason: str) -> None:
    command = [sys.executable, "-c", "import os, sys, time; " + program]
    made = run_one(Check(name="x", run=lambda _: None, limit=limit), Hardware(0), command)
    assert (made.state, made.reason) == (state, reason)
    assert ("last words" in made.output) is (state == "FAIL")


def test_report_hides_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster.example.org")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/josé/data set/run.py:/opt/x/y")
    text = (
        "GPU-12345678-aaaa at /home/jane/data on node17.cluster.example.org or node17x, /dev/shm/nccl-1, 3/4, "
        'File "/srv/anna k/lib/run.py", line 3; file:///home/ida/x and https://pytorch.org/get-started/locally'
    )
    assert hide_names(text) == hide_names(text)
    write_report(tmp_path / "report", [outcome("FAIL", text)], collect_facts())
    hidden = (tmp_path / "report").read_text()
    for name in ("12345678", "jane", "node17", "cluster", "anna", "ida", "jos", "data set", "opt/x"):
        assert name not in hidden
    for kept in ("/dev/shm/nccl-1", "3/4", "https://pytorch.org/get-started/locally"):
        assert kept in hidden
    report = json.loads(hidden)
    assert report["facts"]["variables"]["NCCL_TOPO_FILE"].count("/") == 2
    assert report["checks"][0]["reason"] == report["checks"][0]["output"]


def test_folder_that_cannot_be_written_is_an_error_before_the_checks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--folder .*missing: the report cannot be written there: No such file"):
        check(only=["fresh"], folder=str(tmp_path / "missing"), cpu=True)


def test_interrupted_check_leaves_a_report_of_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_and_be_interrupted(check: Check, _: Hardware) -> Outcome:
        if "weighted" in check.name:
            raise KeyboardInterrupt
        return outcome("PASS")

    monkeypatch.setattr(check_program, "run_one", pass_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(only=["accumulation"], folder=str(tmp_path), cpu=True)
    (file,) = tmp_path.glob("gpu-check-*.json")
    assert [outcome["state"] for outcome in json.loads(file.read_text())["checks"]] == ["PASS"]


def test_notebook_finds_the_wheel_and_shows_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = nbformat.read(ROOT / "notebooks/gpu_check.ipynb", as_version=4).cells
    install, run, show = [cell.source for cell in cells if cell.cell_type == "code"]
    find, _, command = install.rpartition("\n")
    assert command == "%pip install --quiet {wheels[-1]}"
    assert run == "!python -m notebook_launcher check"
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(AssertionError, match="upload the wheel first"):
        exec(find, {})
    wheel = Path("../dist/notebook_launcher-1.0-py3-none-any.whl")
    wheel.parent.mkdir()
    wheel.touch()
    found: dict[str, Any] = {}
    exec(find, found)
    assert found["wheels"] == [wheel]
    write_report(Path("gpu-check-2026-01-01.json"), [outcome("PASS")], {**collect_facts(), "checked_gpus": 0})
    exec(show, {})
    assert "'checked_gpus': 0" in capsys.readouterr().out


def test_words_choose_checks_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(only=["Group"], names_only=True) == 0
    assert capsys.readouterr().out == "process group of two ranks\n"
    with pytest.raises(LookupError, match=r"--only nothing: no check has such a name\. --list prints all names"):
        check(only=["nothing"])


def test_command_makes_checks_in_their_cpu_forms_and_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "notebook_launcher", "check", "--cpu", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--only", "group"], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0] == PROVES_NOTHING
    assert lines[1].startswith("PASS  process group of two ranks")
    assert lines[2] == f"1 passed, 0 failed, 0 skipped. {PROVES_NOTHING}"
    (file,) = tmp_path.glob("gpu-check-*.json")
    report = json.loads(file.read_text())
    assert [outcome["state"] for outcome in report["checks"]] == ["PASS"]
    assert report["facts"]["checked_gpus"] == 0
    assert report["facts"]["torch"]["version"]
