"""`notebook-launcher check`: its table, its report, its limits; here without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from notebook_launcher import ConfigError
from notebook_launcher.gpu_check import check_program
from notebook_launcher.gpu_check.check_program import (
    PROVES_NOTHING,
    Outcome,
    check,
    check_sharing,
    collect_facts,
    hide_names,
    last_lines,
    main,
    report_file,
    run_one,
    write_report,
)
from notebook_launcher.gpu_check.checks import CHECKS, Check, Hardware, Skipped, bare, gpu_difference
from tests.gpu import several_ranks
from tests.gpu.trainings import compare_phases
from tests.support.kernels import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


def outcome(state: str) -> Outcome:
    return Outcome(name="any", state=state, seconds=0.0, reason="")


@pytest.mark.parametrize(
    ("outcomes", "num_gpus", "complete", "words"),
    [
        ([outcome("PASS")], 0, True, PROVES_NOTHING),
        ([outcome("PASS")], 1, True, r"passed on 1 GPU\.$"),
        ([outcome("PASS")], 2, False, "nothing may be claimed"),
        ([outcome("PASS"), outcome("SKIP")], 2, True, "nothing may be claimed"),
        ([outcome("PASS"), outcome("FAIL")], 2, True, "please report it"),
    ],
)
def test_conclusion_claims_only_what_was_tried(
    *, outcomes: list[Outcome], num_gpus: int, complete: bool, words: str
) -> None:
    assert re.search(words, last_lines(outcomes, Hardware(num_gpus), complete=complete))


def test_names_of_checks_are_unique() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_check_that_cannot_be_made_is_skipped_with_its_reason() -> None:
    made = run_one(Check(name="x", run=lambda _: None, num_gpus=2, on_cpu=False), Hardware(0))
    assert (made.state, made.reason) == ("SKIP", "needs a GPU")
    made = run_one(Check(name="x", run=lambda _: None, num_gpus=2), Hardware(1))
    assert (made.state, made.reason) == ("SKIP", "needs 2 GPUs")
    made = run_one(Check(name="x", run=lambda _: None, num_gpus=2, can_share=False), Hardware(1, shares=True))
    assert (made.state, made.reason) == ("SKIP", "needs 2 GPUs")


def test_ranks_share_a_gpu_where_the_check_allows_it() -> None:
    assert not Check(name="x", run=lambda _: None, num_gpus=2).why_not(Hardware(1, shares=True))
    assert Hardware(1, shares=True).ranks(2)["devices"] == [0]
    assert Hardware(2, shares=True).ranks(2)["devices"] == [0, 1]
    assert Hardware(0, shares=True).ranks(2)["devices"] == "cpu"


def test_sharing_is_refused_by_an_nccl_that_cannot() -> None:
    with pytest.raises(ConfigError, match=r"--share needs NCCL 2.30 or newer, and torch has loaded 2\.28\.9\. Name a"):
        check_sharing(22809)
    for version in (None, 23003, 23102):
        check_sharing(version)


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
        (
            "import json; open(sys.argv[4], 'w').write(json.dumps(['PASS', ' '.join(sys.argv[1:4])]))",
            50,
            "PASS",
            "x 0 False",
        ),
        ("print('last words', flush=True); os.abort()", 50, "FAIL", "its process ended with status -6"),
        ("print('last words', flush=True); time.sleep(60)", 0.5, "FAIL", "not done after 0.5 s"),
    ],
)
def test_outcome_follows_from_the_end_of_the_process(program: str, limit: float, state: str, reason: str) -> None:
    command = [sys.executable, "-c", "import os, sys, time; " + program]
    made = run_one(Check(name="x", run=lambda _: None, limit=limit), Hardware(0), command)
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


@pytest.mark.parametrize(
    "path",
    [
        "/home/josé/data set/run.py",
        "/srv/anna k/lib",
    ],
)
def test_report_hides_paths_with_spaces_and_accents(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", f"{path}:/opt/x/y")
    said = f'File "{path}", line 3; file:///home/ida/x and https://pytorch.org/get-started/locally'
    failed = Outcome(name="any", state="FAIL", seconds=0.0, reason=said, output=said)
    write_report(tmp_path / "report", [failed], collect_facts())
    text = (tmp_path / "report").read_text()
    for name in ("jos", "data set", "anna", "opt/x", "ida"):
        assert name not in text
    assert "https://pytorch.org/get-started/locally" in text
    report = json.loads(text)
    assert report["facts"]["variables"]["NCCL_TOPO_FILE"].count("/") == 2
    assert report["checks"][0]["reason"] == report["checks"][0]["output"]


def test_short_name_of_the_host_is_hidden_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster.example.org")
    hidden = hide_names("node17.cluster.example.org or node17 alone")
    assert "node17" not in hidden
    assert "cluster" not in hidden


def test_folder_that_cannot_be_written_is_an_error_before_the_checks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--folder .*missing: the report cannot be written there: No such file"):
        check(only=["seen alike"], folder=str(tmp_path / "missing"), cpu=True)


def test_interrupted_check_leaves_a_report_of_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_two(*_: Any) -> Iterator[Outcome]:
        yield outcome("PASS")
        raise KeyboardInterrupt

    monkeypatch.setattr(check_program, "run_all", run_two)
    with pytest.raises(KeyboardInterrupt):
        check(only=["seen alike"], folder=str(tmp_path), cpu=True)
    (file,) = tmp_path.glob("gpu-check-*.json")
    assert [outcome["state"] for outcome in json.loads(file.read_text())["checks"]] == ["PASS"]


@pytest.mark.parametrize(
    ("ours", "torchs", "by_number", "told"),
    [
        ([], [], False, ""),
        (["a", "b"], ["b", "a"], False, ""),
        (["a"], ["a", "b"], False, "the launcher sees 1 GPUs, torch 2"),
        (["a"], ["b"], False, "launcher and torch see different GPUs"),
        (["a"], ["b"], True, ""),
        ([""], ["b"], False, ""),
    ],
)
def test_gpus_are_compared_by_their_uuids(ours: list[str], torchs: list[str], told: str, *, by_number: bool) -> None:
    assert gpu_difference(ours, torchs, by_number=by_number) == told


def test_uuids_of_nvml_are_read_as_torch_writes_them() -> None:
    assert [bare(uuid) for uuid in ("GPU-12-34", "MIG-12-34", "")] == ["12-34", "", ""]


@pytest.mark.parametrize(
    ("reported", "expected", "on_gpu", "error"),
    [
        (1.05, 1.0, True, None),
        (1.15, 1.0, True, "forward 1.150 s of 1.000 s"),
        (0.0, 0.05, True, "forward 0.000 s of 0.050 s: too short to compare"),
        (0.05, 0.05, True, "forward 0.050 s of 0.050 s: too short to compare"),  # 10 % of so short a time are noise.
        (0.055, 0.05, False, None),
    ],
)
def test_phases_are_compared_where_there_is_something_to_compare(
    reported: float, expected: float, *, on_gpu: bool, error: str | None
) -> None:
    times: list[dict[str, float]] = [{"forward": reported}, {"forward": expected}]
    with pytest.raises(AssertionError, match=error) if error else contextlib.nullcontext():
        assert compare_phases(*times, on_gpu=on_gpu).startswith("forward 1.050 s" if on_gpu else "forward 0.055 s")


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
    write_report(report_file(Path()), [outcome("PASS")], {**collect_facts(), "checked_gpus": 0})
    exec(show, {})
    assert "'checked_gpus': 0" in capsys.readouterr().out


def test_words_choose_checks_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(only=["Group"], names_only=True) == 0
    assert capsys.readouterr().out == "process group of two ranks\n"
    with pytest.raises(LookupError, match=r"--only nothing: no check has such a name\. --list prints all names"):
        check(only=["nothing"])


def test_command_makes_checks_in_their_cpu_forms_and_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "notebook_launcher", "check", "--cpu", "--folder", str(tmp_path)]
    only = ["--only", "process group", "device-side", "ragged and weighted"]
    done = subprocess.run([*command, *only], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0] == PROVES_NOTHING
    assert lines[-2] == f"2 passed, 0 failed, 1 skipped. {PROVES_NOTHING}"
    (file,) = tmp_path.glob("gpu-check-*.json")
    report = json.loads(file.read_text())
    assert sorted(outcome["state"] for outcome in report["checks"]) == ["PASS", "PASS", "SKIP"]
    assert report["facts"]["checked_gpus"] == 0
    assert report["facts"]["torch"]["version"]


def test_sharding_is_skipped_where_this_torch_cannot_shard_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    monkeypatch.delattr(FSDPModule, "set_force_sum_reduction_for_comms", raising=False)  # As in torch 2.7.
    sharded = [check for check in several_ranks.CHECKS if check.name.startswith("sharded model")]
    assert len(sharded) == 2
    for each in sharded:
        with pytest.raises(Skipped, match=r"needs torch 2\.8"):
            each.run(Hardware(0))
