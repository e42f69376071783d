"""Runs that are read from their folders, in whatever state the folders are, and the list of runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from notebook_launcher import RecordedRun, Run, RunFolderError, launch, notebook_launch, open_run, runs
from notebook_launcher.history import run_folders
from tests.support.toy_runs import make_run, speak


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that is over, in a folder of its own."""
    run = launch(speak, 1, output="none", seed=4, runs_folder=tmp_path_factory.mktemp("kept"))
    run.wait()
    return run


@pytest.fixture
def copy(original: Run, tmp_path: Path) -> RecordedRun:
    """Its folder, to do with as one likes."""
    assert original.config.runs_folder is not None
    shutil.copytree(Path(original.config.runs_folder, original.id), tmp_path / original.id)
    return open_run(original.id, tmp_path)


@pytest.mark.parametrize(
    "end", [b'{"rank":0,"st', b"\x00\xff", b'{"rank":0,"step":9,"time":0.0,"values":{"loss":1.0}}']
)
def test_incomplete_last_line_and_lines_that_are_not_metrics_are_not_read(end, original, copy):
    path = copy.folder / run_folders.METRICS
    path.write_bytes(b'\n[]\n{"rank":0}\nnonsense\n\xff\xfe\n{"values":3}\n' + path.read_bytes() + end)
    assert copy.metrics == original.metrics
    assert "a table: .to_pandas()" in repr(copy.metrics) == repr(original.metrics)


def test_fields_of_a_later_version_are_ignored(original, copy):
    for name in (run_folders.CONFIG, run_folders.SUMMARY):
        path = copy.folder / name
        data = {**json.loads(path.read_text()), "hologram": {"depth": 3}}
        for rank in data.get("ranks", []):
            rank["mood"] = "good"
        path.write_text(json.dumps(data))
    path = copy.folder / run_folders.METRICS
    path.write_text("".join(f'{{"unit": "m", {line[1:]}\n' for line in path.read_text().splitlines()))
    assert copy.snapshot() == original.snapshot()
    assert copy.config == original.config
    assert copy.metrics == original.metrics


def test_folder_can_be_moved_and_its_summary_has_the_config(original, copy, tmp_path):
    (copy.folder / run_folders.CONFIG).unlink()
    assert copy.config == original.config
    moved = copy.folder.rename(tmp_path / "the good one")
    assert open_run(moved).metrics == original.metrics
    assert open_run(str(moved)).id == "the good one"


def test_folder_without_summary_is_a_lost_run(home):
    folder = make_run(home, 123456)
    (folder / run_folders.SUMMARY).unlink()
    os.utime(folder, (0, 0))
    (run,) = runs()
    assert (run.state, run.name, len(run.ranks)) == ("lost", "train", 0)
    assert time.strftime("%Y%m%d-%H%M%S", time.localtime(run.snapshot().started)) == "20261121-123456"
    assert "lost" in run._repr_html_()
    assert "lost" in repr(runs())


@pytest.mark.parametrize(
    ("summary", "reason"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it holds list instead of an object"),
        ('{"state": "done"}', "missing 6 required keyword-only arguments"),
        ('{"ranks": 3}', "ranks: 3"),
        ('{"ranks": [{"rank": "0"}]}', "ranks: rank: '0'"),
    ],
)
def test_one_bad_summary_costs_its_own_row_alone(summary, reason, home):
    folder = make_run(home, 123456)
    make_run(home, 123457)
    (folder / run_folders.SUMMARY).write_text(summary)
    os.utime(folder, (0, 0))
    table = repr(runs())
    assert f"unreadable: summary.json is damaged: {reason}" in table
    assert "123457" in table
    with pytest.raises(RunFolderError, match=re.escape(f"{folder}/summary.json is damaged: {reason}")):
        open_run(folder.name).snapshot()
    assert runs().delete() == 2


def test_open_run_accepts_the_beginning_of_an_id(tmp_path):
    for number in (100001, 100002, 110000):
        make_run(tmp_path, number)
    assert open_run("20261121-11", tmp_path).id == "20261121-110000-train-000000"
    assert open_run("20261121-100002-train-000002", tmp_path).snapshot().started == 100002


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("20261121-10", r"2 runs in .* begin with '20261121-10': 20261121-100002-train-000002, .*\. Type more of"),
        ("20261121-100009-train-000002", r"no run .* in .*Did you mean 20261121-100002-train-000002 or .* 3\.$"),
        ("train", r"there is no run 'train' in .* Did you mean 20261121-110000-train-000000 or "),
        ("tarin", r"there is no run 'tarin' in .* Did you mean 20261121-110000-train-000000\? runs\(\), in a terminal"),
        ("zzz", r"there is no run 'zzz' in .* The latest is 20261121-110000-train-000000\. "),
        ("", r"there is no run ''"),
    ],
)
def test_open_run_lists_the_closest_ids(name, message, tmp_path):
    for number in (100001, 100002, 110000):
        make_run(tmp_path, number)
    with pytest.raises(LookupError, match=message):
        open_run(name, tmp_path)


def test_latest_run_of_one_second_is_the_one_that_was_launched_last(tmp_path):
    earlier = make_run(tmp_path, 100001, started=100001.7)
    later = earlier.with_name("20261121-100001-train-000000")
    make_run(tmp_path / "elsewhere", 100001, started=100001.9).rename(later)
    assert earlier.name > later.name
    for name in ("zzz", "tarin"):
        with pytest.raises(LookupError, match=rf"(The latest is|Did you mean) {later.name}[.?]"):
            open_run(name, tmp_path)


def test_opening_a_folder_without_a_run_raises_lookup_error(tmp_path):
    with pytest.raises(LookupError, match=rf"there is no run 'x': no run has left a folder in {tmp_path}/none"):
        open_run("x", tmp_path / "none")
    with pytest.raises(LookupError, match=r"there is no folder .*/gone: the run was removed"):
        open_run(tmp_path / "gone")
    with pytest.raises(LookupError, match=r"does not hold a run: it has no summary.json"):
        open_run(str(tmp_path))


@pytest.mark.parametrize("look", [runs, lambda: open_run("x")])
def test_runs_raises_lookup_error_when_recording_is_off(look, monkeypatch):
    monkeypatch.setenv(run_folders.VARIABLE, "off")
    with pytest.raises(LookupError, match=r"runs are not recorded: NOTEBOOK_LAUNCHER_RUNS is 'off'. Pass the folder"):
        look()


def test_runs_are_listed_newest_first(home):
    assert repr(runs()) == f"no runs in {home}"
    assert str(home) in runs()._repr_html_()
    for number in range(1, 21):
        make_run(home, number)
    found = runs()
    assert [run.snapshot().started for run in found] == list(range(20, 0, -1))
    assert (len(found), len(found[3:5]), found[-1].snapshot().started) == (20, 2, 1)
    lines = repr(found).splitlines()
    assert lines[0] == f"20 runs in {home}"
    assert re.match(r"id +name +when +state +time +ranks +disk", lines[1])
    assert lines[-1] == "and 4 older: runs()[16:]"
    assert len(lines) == 1 + 1 + 16 + 1


def test_notebook_shows_a_recorded_run_as_a_page_and_the_table_its_last_metrics(home):
    notebook_launch(speak, 2, output="none")
    assert repr(runs()).splitlines()[-1].endswith("loss 0.5, accuracy 1")
    assert "loss 0.5, accuracy 1" in runs()._repr_html_()
    html = runs()[0]._repr_html_()
    assert "accuracy" in html
    assert "hello" in html
