"""Runs that people keep: names, tags, notes, source, environment and git commit in the folder of a run."""

from __future__ import annotations

import datetime as dt
import functools
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from notebook_launcher import RecordedRun, launch, open_run, report, runs
from notebook_launcher.command_line.program import main
from notebook_launcher.errors import ConfigError
from notebook_launcher.kernel.calls import origin
from notebook_launcher.kernel.calls.origin import GitChanges, git_commit
from notebook_launcher.widgets import ConfigPanel, compare
from tests.support.panels import press
from tests.support.programs import type_command
from tests.support.toy_runs import make_run

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import math
from notebook_launcher import notebook_launch, report
RATE = 0.5
class Scale:
    factor = RATE
def halve(x):
    return x * Scale.factor * math.pi
def unused():
    pass
table = {1: object()}
def train(rate):
    report(loss=halve(rate), known=len(table))
if __name__ == "__main__":
    notebook_launch(
        train, 1, args=(0.5,), name="first try", tags=["baseline", "small"], output="none", start_method="fork"
    )
"""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_folder_has_name_tags_source_with_its_helpers_versions_and_commit(home, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "x")
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, timeout=60)
    (run,) = runs(home)
    assert (run.name, run.tags, run.notes) == ("first try", ("baseline", "small"), "")
    assert "first-try" in run.id
    source = run.source
    compile(source, "function.py", "exec")
    assert source.endswith("def train(rate):\n    report(loss=halve(rate), known=len(table))\n")
    assert "import math\n" in source
    assert "from notebook_launcher import report\n" in source
    assert "RATE = 0.5\n" in source
    assert "# table is a value of the notebook, which is not kept here" in source
    assert source.index("class Scale") < source.index("def halve") < source.index("def train")
    assert "unused" not in source
    environment = run.environment
    assert environment["packages"].keys() >= {"torch", "notebook-launcher"}
    commit = {"commit": git(tmp_path, "rev-parse", "HEAD"), "branch": "main", "repository": str(tmp_path)}
    assert environment["git"] == {**commit, "dirty": False, "changed": []}
    assert environment["cwd"] == str(tmp_path)
    assert run.config.tags == ("baseline", "small")
    assert "baseline, small" in repr(runs(home))
    run.delete()
    assert not run.folder.exists()


def test_runs_are_chosen_by_their_age_in_seconds_or_as_a_timedelta(home):
    make_run(home, 1)
    for age in (3600, 3600.0, dt.timedelta(hours=1)):
        assert len(runs(home).filter(within=age)) + len(runs(home).filter(before=age)) == 1


def test_name_tags_and_notes_are_edited_in_the_folder(home):
    make_run(home, 1, config={"tags": ["old"]})
    (run,) = runs(home)
    assert run.tags == ("old",)
    run.edit(name="best", notes="lr 0.1\nkeep")
    run.edit(tags=["kept", "x"])
    again = RecordedRun(run.folder)
    assert (again.name, again.tags, again.notes) == ("best", ("kept", "x"), "lr 0.1\nkeep")
    assert run.name == "best"
    assert compare(run).runs["A"].name == "best"
    assert len(runs(home).filter(tag="kept")) == 1
    assert len(runs(home).filter(tag="old")) == 0
    run.edit(tags=[])
    assert again.tags == ()
    with pytest.raises(ConfigError, match="is not a name"):
        run.edit(name="two\nlines")


def test_runs_are_edited_from_the_command_line(home, tmp_path, capsys):
    make_run(home, 1)
    done = type_command("runs", "edit", "last", "--tags", "a", "b", "--notes", "good", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train; tags: a, b; notes: good\n" in done.stdout
    assert main(["runs", "list", "--tag", "a"]) == 0
    assert "a, b" in capsys.readouterr().out
    assert main(["runs", "show", "last"]) == 0
    assert "notes: good" in capsys.readouterr().out
    assert main(["runs", "edit", "last", "--tags", "b,c,", "d"]) == 0
    assert open_run("last").tags == ("b", "c", "d")


def test_live_run_is_edited_before_and_after_its_folder_exists(home):
    run = launch(report, 1, kwargs={"loss": 1.0}, output="none")
    run.edit(name="first", tags="a")
    assert (run.name, run.tags, run.notes, run.snapshot().name) == ("first", ("a",), "", "first")
    run.result()
    run.edit(notes="good")
    (kept,) = runs(home)
    assert (kept.name, kept.tags, kept.notes, run.notes) == ("first", ("a",), "good", "good")
    with pytest.raises(ConfigError, match="is not a name"):
        run.edit(name="")


def test_changes_since_the_commit_are_kept_as_a_patch(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    (tmp_path / "model.py").write_text("width = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    monkeypatch.chdir(tmp_path)
    assert "changes.diff" not in files_of(print)
    (tmp_path / "model.py").write_text("width = 2\n")
    files = files_of(print)
    told = json.loads(files["environment.json"])["git"]
    assert (told["dirty"], told["changed"]) == (True, ["model.py"])
    assert "-width = 1\n+width = 2\n" in files["changes.diff"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "dirty" not in json.loads(files_of(print)["environment.json"])["git"]
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nwhile :; do :; done\n")
    slow.chmod(0o700)
    changes = GitChanges(str(tmp_path))
    assert changes.poll(wait=False) == (False, None)
    assert changes.poll(wait=True) == (True, None)


def test_versions_follow_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "made_up", origin)
    assert "made_up" not in origin.describe_environment()["packages"]
    (tmp_path / "made_up-1.5.dist-info").mkdir()
    (tmp_path / "made_up-1.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: made_up\nVersion: 1.5\n")
    assert origin.describe_environment()["packages"]["made_up"] == "1.5"


def files_of(function):
    told = origin.Origin(origin.source_with_needs(function), origin.describe_environment())
    return {**told.files, **(told.later(wait=True) or {})}


def test_commit_is_found_in_worktrees_packed_references_and_detached_heads(tmp_path):
    main_folder = tmp_path / "main"
    main_folder.mkdir()
    git(main_folder, "init", "-q")
    git(main_folder, "commit", "-q", "--allow-empty", "-m", "x")
    commit = git(main_folder, "rev-parse", "HEAD")
    git(main_folder, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    side = str(tmp_path / "side")
    assert git_commit(tmp_path / "side") == {"commit": commit, "branch": "side", "repository": side}
    git(main_folder, "pack-refs", "--all")
    assert git_commit(main_folder / "deep" / "down")["commit"] == commit
    git(main_folder, "checkout", "-q", "--detach")
    assert git_commit(main_folder) == {"commit": commit, "repository": str(main_folder)}


def test_origin_of_a_partial_is_its_function_and_variables_of_libraries_are_kept(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    files = files_of(functools.partial(make_run, number=1))
    assert files["function.py"].startswith("def make_run(")
    assert json.loads(files["environment.json"])["variables"]["NCCL_DEBUG"] == "INFO"
    assert "function.py" not in files_of(print)


def exported_from_the_panel(rate: float = 0.1) -> float:
    return rate


def test_panel_exports_the_launch_as_a_script(tmp_path):
    panel = ConfigPanel(exported_from_the_panel, 2, seed=1, kwargs={"rate": 0.25})
    press(panel, type="path", key="script", value=str(tmp_path / "script.txt"))
    press(panel, type="export")
    assert "the name of a script ends in .py" in panel.form["notes"]["script"][0]
    press(panel, type="path", key="script", value=str(tmp_path / "script.py"))
    press(panel, type="path", key="slurm", value=True)
    press(panel, type="export")
    assert "Written. torchrun --standalone --nproc-per-node=2 script.py" in panel.form["notes"]["script"][0]
    assert "exported_from_the_panel(rate=0.25)" in (tmp_path / "script.py").read_text()
    assert (tmp_path / "script.sbatch").exists()
    panel.close()
    empty = ConfigPanel()
    press(empty, type="export")
    assert "The panel has no function" in empty.form["notes"]["script"][0]
    empty.close()
