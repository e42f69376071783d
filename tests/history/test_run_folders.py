"""Run folders: contents during a run and after it, and failures of writing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from notebook_launcher import RecordedRun, Session, launch, notebook_launch, open_run, report, runs
from notebook_launcher.history import run_folders
from tests.support.kernels import Kernel
from tests.support.toy_runs import PATIENCE, make_run, speak
from tests.support.waiting import until
from tests.support.warm_kernels import evaluate


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("chosen", "environment", "found"),
    [
        ("auto", {}, "/home/me/.local/state/notebook-launcher/runs"),
        ("auto", {"XDG_STATE_HOME": "/state"}, "/state/notebook-launcher/runs"),
        ("auto", {"XDG_STATE_HOME": "state"}, "/home/me/.local/state/notebook-launcher/runs"),
        ("auto", {"XDG_STATE_HOME": "/state", run_folders.VARIABLE: "/mine"}, "/mine"),
        ("auto", {run_folders.VARIABLE: ""}, "/home/me/.local/state/notebook-launcher/runs"),
        ("auto", {run_folders.VARIABLE: "~/mine"}, "/home/me/mine"),
        ("/given", {run_folders.VARIABLE: "/mine"}, "/given"),
        (Path("/given"), {}, "/given"),
        (None, {run_folders.VARIABLE: "/mine"}, None),
        ("auto", {run_folders.VARIABLE: "off"}, None),
    ],
)
def test_find_home_follows_the_option_and_the_environment(chosen, environment, found, monkeypatch):
    for name in ("XDG_STATE_HOME", run_folders.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    assert run_folders.find_home(chosen) == (None if found is None else Path(found))


def test_recorded_run_equals_the_live_run_but_for_secrets_and_is_readable_by_the_user_alone(home, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    env = {"HF_TOKEN": "hush", "NCCL_DEBUG": "WARN"}
    run = launch(speak, 2, output="none", seed=3, env=env, max_grad_norm=0.5)
    run.result()
    again = open_run(run.id)
    assert isinstance(again, RecordedRun)
    # A run of 2 s or more has samples of its usage, which the folder keeps rounded.
    assert dataclasses.replace(again.snapshot(), usage={}) == dataclasses.replace(run.snapshot(), usage={})
    assert (again.id, again.name, again.state, again.seed) == (run.id, "speak", "done", 3)
    assert again.config == dataclasses.replace(run.config, env={"NCCL_DEBUG": "WARN"})
    assert again.metrics == run.metrics
    assert again.ranks == run.ranks
    assert again.phases == run.phases
    assert [again.logs(rank) for rank in (0, 1)] == [run.logs(rank) for rank in (0, 1)] == ["hello\n"] * 2
    assert repr(again).startswith(f"<RecordedRun {run.id} on 2 ranks: done, ")
    with pytest.raises(LookupError, match="there is no rank 2"):
        again.logs(2)
    # Changes of the working tree are there if there are any.
    files = sorted(path for path in again.folder.iterdir() if path.name != "changes.diff")
    names = "config.json environment.json function.py log-order.txt metrics.jsonl rank-0.log rank-1.log summary.json"
    assert [path.name for path in files] == names.split()
    assert not any(b"hush" in path.read_bytes() for path in files)
    assert [path.name for path in (home, again.folder, *files) if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_short_silent_run_leaves_no_folder(home):
    with Session(1, output="none") as session:
        session.run(int)  # It may wait for the import of torch, and is not short then.
        num_earlier = len(runs())
        session.run(int)
        assert len(runs()) == num_earlier
        session.run(speak)
        session.run(speak)
    assert [run.name for run in runs()].count("speak") == 2


def test_runs_folder_option_chooses_the_folder(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook_launch(speak, 1, output="none", runs_folder="here")
    assert [run.name for run in runs("here")] == ["speak"]
    assert open_run(runs("here")[0].folder).name == "speak"
    assert not home.exists()


NASTY = "<script>alert('1')</script>/../\"x\"\n\N{SNOWMAN}"


def test_odd_names_numbers_and_failures_are_kept_and_cannot_leave_their_file(home):
    def measure() -> None:
        from notebook_launcher import reporting

        if os.environ["RANK"] == "3":
            print(NASTY)
            reporting.report_values({NASTY: 1.0, "loss": math.nan, "low": -math.inf})
            raise ValueError("boom")

    measure.__name__ = measure.__qualname__ = NASTY
    run = launch(measure, 4, output="none", backend=None)
    run.wait(PATIENCE)
    (found,) = runs()
    assert found.folder.parent == home
    assert re.fullmatch(r"[\w-]+", found.id, re.ASCII)
    assert found.name == run.name == NASTY
    assert [path.name for path in found.folder.glob("rank-*")] == ["rank-3.log"]  # Only ranks with output have one.
    assert (found.logs(0), found.logs(3), len(found.ranks)) == ("", NASTY + "\n", 4)
    for path in found.folder.glob("*.json*"):
        for line in path.read_text("ascii").splitlines():
            strict_json(line)
    for values in (found.metrics[0].values, found.ranks[3].metrics):
        assert math.isnan(values["loss"])
        assert (values[NASTY], values["low"]) == (1.0, -math.inf)
    for html in (runs()._repr_html_(), found._repr_html_()):
        assert "<script" not in html
        assert "&lt;script" in html
    snapshot = found.snapshot()
    assert (found.state, snapshot.error, snapshot.failures) == ("failed", "ValueError: boom", run.snapshot().failures)
    assert "raise ValueError" in snapshot.failures[0].traceback


def test_live_run_can_be_read_from_its_folder(home, tmp_path):
    def in_two_steps(go: str) -> None:
        report(loss=1.0)
        print("one", flush=True)
        until(Path(go).exists)
        report(loss=2.0)
        print("two", flush=True)

    run = launch(in_two_steps, 1, output="none", args=(str(tmp_path / "go"),))
    with contextlib.ExitStack() as stack:
        stack.callback(run.stop)
        again = until(lambda: len(runs()) and open_run(run.id))
        until(lambda: again.state == "running" and again.metrics and again.logs(0))
        assert again.ranks[0].state == "running"
        (first,), position = again.metrics_since(0)
        text, mark = again.logs_since(0, 0)
        (tmp_path / "go").touch()
        run.result(timeout=PATIENCE)
    assert (first.values, text) == ({"loss": 1.0}, "one\n")
    assert [point.values for point in again.metrics_since(position)[0]] == [{"loss": 2.0}]
    assert again.metrics_since(2) == ([], 2)
    assert again.logs_since(0, mark)[0] == "two\n"
    assert again.state == "done"


ENDLESS = """
import os, time
from notebook_launcher import *
def endless():
    for step in range(10**9):
        report(loss=1 / (step + 1))
        print("step", step)
        time.sleep(0.01)
run = launch(endless, 2, output="none")
run.id
"""


@pytest.mark.slow
def test_killed_kernel_leaves_a_lost_run(home):
    with Kernel() as kernel:
        run_id = evaluate(kernel, ENDLESS)
        again = until(lambda: (home / run_id / "rank-1.log").exists() and open_run(run_id))
        until(lambda: again.state == "running" and len(again.metrics) > 2)
        kernel.kill()
        until(lambda: again.state == "lost")
    assert (again.name, again.logs(0)[:7]) == ("endless", "step 0\n")
    assert [rank.state for rank in again.ranks] == ["unknown"] * 2
    assert re.search(rf"{run_id} .* lost ", repr(runs()))
    assert again.snapshot().error == "the kernel ended before the run did"


def test_unusable_runs_folder_is_reported_once(home, capfd):
    home.write_text("a file")
    assert list(notebook_launch(speak, 1)) == [7]
    err = capfd.readouterr().err
    assert err.count("recording of the run ended") == 1
    assert f"in {home}: Not a directory" in err


@pytest.mark.parametrize("home_variable", ["a/relative/path", "~nobody-at-all"])
def test_home_that_is_no_full_path_is_reported(home_variable, monkeypatch):
    for name in ("XDG_STATE_HOME", run_folders.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home_variable)
    expected = rf"no home folder is known \(HOME='{home_variable}'\): set the variable HOME to a full path"
    with pytest.raises(RuntimeError, match=expected):
        run_folders.find_home()


def test_full_disk_does_not_fail_the_run(home, tmp_path, capfd):
    def flood(go: str) -> str:
        print("before", flush=True)
        until(Path(go).exists)
        for step in range(500):
            report(loss=float(step))
            print("x" * 100)
        until(Path(go + "on").exists)
        return "well"

    run = launch(flood, 1, args=(str(tmp_path / "go"),), output="none")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack:
        stack.callback(run.stop)
        until(lambda: len(runs()))
        # Ranks are born, so that the limit binds this process alone. Python ignores SIGXFSZ.
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        os.close(os.open(tmp_path / "go", os.O_CREAT))
        err = until(lambda: capfd.readouterr().err)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (tmp_path / "goon").touch()
        assert list(run.result(timeout=PATIENCE)) == ["well"]
    assert err.count("recording of the run ended") == 1
    assert f"in {home / run.id}: File too large" in err
    again = open_run(run.id)
    assert again.state == "done"
    assert again.ranks[0].metrics == {"loss": 499.0}
    assert [point.step for point in again.metrics] == list(range(len(again.metrics)))


def test_launch_removes_old_runs(home, monkeypatch):
    monkeypatch.setattr(run_folders, "MAX_RUNS", 3)
    for number in range(1, 6):
        make_run(home, number)
    run = launch(speak, 1, output="none")
    run.result()
    until(lambda: len(runs()) == 3)
    assert runs()[0].id == run.id
