"""What runs leave behind: written while they go on, read again by any kernel, bounded in number and size."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import notebook_launcher
from notebook_launcher import (
    ConfigError,
    LaunchConfig,
    RecordedRun,
    Session,
    launch,
    notebook_launch,
    open_run,
    report,
    runs,
)
from notebook_launcher.history import files, folders, owners
from notebook_launcher.history.files import LogFile, MetricsFile
from notebook_launcher.history.records import MetricPoint
from notebook_launcher.kernel.ranklog import RankLog
from tests.kernels import ROOT, Kernel
from tests.scenes import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 20.0


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for runs, which everything started from here uses."""
    monkeypatch.setenv(folders.VARIABLE, str(tmp_path / "runs"))
    return tmp_path / "runs"


def wait_until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    return value


def wait_for(path: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def speak(number: float = 0.5) -> int:
    print("hello")
    for step in range(3):
        report(step=step, loss=number, accuracy=step / 2)
    return 7


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


# Where they lie.


@pytest.mark.parametrize(
    ("chosen", "environment", "found"),
    [
        ("auto", {}, "/home/me/.local/state/notebook-launcher/runs"),
        ("auto", {"XDG_STATE_HOME": "/state"}, "/state/notebook-launcher/runs"),
        ("auto", {"XDG_STATE_HOME": "state"}, "/home/me/.local/state/notebook-launcher/runs"),
        ("auto", {"XDG_STATE_HOME": "/state", folders.VARIABLE: "/mine"}, "/mine"),
        ("auto", {folders.VARIABLE: ""}, "/home/me/.local/state/notebook-launcher/runs"),
        ("auto", {folders.VARIABLE: "~/mine"}, "/home/me/mine"),
        ("/given", {folders.VARIABLE: "/mine"}, "/given"),
        (Path("/given"), {}, "/given"),
        (None, {folders.VARIABLE: "/mine"}, None),
    ],
)
def test_the_place_is_found(chosen, environment, found, monkeypatch):
    for name in ("XDG_STATE_HOME", folders.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    assert folders.find_home(chosen) == (None if found is None else Path(found))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"runs_folder=3 is a int; it must be a path, 'auto', or None to leave no folder"),
        (b"runs", r"runs_folder=b'runs' is a bytes; it must be a path"),
        ("", r"runs_folder='' is no path. Pass a folder, 'auto', or None to leave none"),
        ("a\0b", r"is no path"),
    ],
)
def test_what_is_no_place_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        LaunchConfig(runs_folder=value)


def test_a_path_is_kept_as_text():
    assert LaunchConfig(runs_folder=Path("some/where")).runs_folder == "some/where"


# What a run leaves.


def test_a_run_is_read_back_as_it_was(home):
    run = launch(speak, 2, output="none", seed=3, env={"COLOUR": "blue"}, max_grad_norm=0.5)
    run.result()
    again = open_run(run.id)
    assert isinstance(again, RecordedRun)
    assert again.snapshot() == run.snapshot()
    assert (again.id, again.name, again.state, again.seed) == (run.id, "speak", "done", 3)
    assert again.config == run.config
    assert again.metrics == run.metrics
    assert again.ranks == run.ranks
    assert again.phases == run.phases
    assert [again.logs(rank) for rank in (0, 1)] == [run.logs(rank) for rank in (0, 1)] == ["hello\n"] * 2
    assert repr(again).startswith(f"<RecordedRun {run.id} on 2 ranks: done, ")
    assert sorted(os.listdir(home / run.id)) == [
        "config.json",
        "metrics.jsonl",
        "rank-0.log",
        "rank-1.log",
        "summary.json",
    ]


def test_only_the_user_may_read_it(home):
    run = launch(speak, 1, output="none")
    run.result()
    paths = [home, home / run.id, *(home / run.id).iterdir()]
    assert [path.name for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_secrets_are_not_written_down(home):
    env = {"WANDB_API_KEY": "hush", "HF_TOKEN": "hush", "db_password": "hush", "TOKENIZERS_PARALLELISM": "false"}
    run = launch(speak, 1, output="none", env=env)
    run.result()
    assert not any(b"hush" in path.read_bytes() for path in (home / run.id).iterdir())
    assert dict(open_run(run.id).config.env) == {"TOKENIZERS_PARALLELISM": "false"}


def test_a_failure_is_kept_however_short_the_run(home):
    def fail() -> None:
        raise ValueError("boom")

    run = launch(fail, 2, output="none")
    run.wait()
    again = open_run(run.id)
    assert again.state == "failed"
    assert again.snapshot().error == "ValueError: boom"
    assert again.snapshot().failures == run.snapshot().failures
    assert "raise ValueError" in again.snapshot().failures[0].traceback


def test_a_short_run_with_nothing_to_say_leaves_nothing(home):
    with Session(2, output="none") as session:
        session.run(int)
        assert len(runs()) == 0
        session.run(speak)
        session.run(speak)
    assert [run.name for run in runs()] == ["speak", "speak"]


def test_no_folder_is_left_if_none_is_wanted(home):
    notebook_launch(speak, 1, output="none", runs_folder=None)
    assert not home.exists()


def test_a_folder_can_be_chosen(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook_launch(speak, 1, output="none", runs_folder="here")
    assert [run.name for run in runs("here")] == ["speak"]
    assert open_run(runs("here")[0].folder).name == "speak"
    assert not home.exists()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_come_back(number, home):
    run = launch(speak, 1, output="none", kwargs={"number": number})
    run.result()
    for path in (home / run.id).glob("*.json*"):
        for line in path.read_text("ascii").splitlines():
            strict_json(line)
    again = open_run(run.id)
    values = [point.values["loss"] for point in again.metrics] + [again.ranks[0].metrics["loss"]]
    assert all(value == number or math.isnan(value) and math.isnan(number) for value in values)
    assert [point.values["accuracy"] for point in again.metrics] == [0.0, 0.5, 1.0]


NASTY = "<script>alert('1')</script>/../\"x\"\n\N{SNOWMAN}"


def test_names_and_text_cannot_break_out(home):
    def measure() -> str:
        from notebook_launcher import context

        print(NASTY)
        context.report_values({NASTY: 1.0})
        return NASTY

    measure.__name__ = measure.__qualname__ = NASTY
    run = launch(measure, 1, output="none")
    run.result()
    (found,) = runs()
    assert found.folder.parent == home
    assert re.fullmatch(r"[\w-]+", found.id, re.ASCII)
    assert found.name == run.name == NASTY
    assert found.metrics[0].values == {NASTY: 1.0}
    assert found.logs(0) == NASTY + "\n"
    for html in (runs()._repr_html_(), found._repr_html_()):
        assert "<script" not in html
        assert "&lt;script" in html


def test_only_ranks_that_wrote_something_have_a_file(home):
    def some(rank_count: int) -> None:
        if int(os.environ["RANK"]) in (3, rank_count - 1):
            print("here")

    run = launch(some, 64, output="none", backend=None, kwargs={"rank_count": 64})
    run.result(timeout=PATIENCE)
    assert sorted(path.name for path in (home / run.id).glob("rank-*")) == ["rank-3.log", "rank-63.log"]
    again = open_run(run.id)
    assert (again.logs(0), again.logs(3), len(again.ranks)) == ("", "here\n", 64)


@pytest.mark.parametrize("rank", [-1, 1, "0"])
def test_a_rank_that_is_not_there_is_refused(rank, home):
    notebook_launch(speak, 1, output="none")
    with pytest.raises(LookupError, match=rf"there is no rank {rank!r}: this run has 1, 0 to 0"):
        runs()[0].logs(rank)


# While it goes on.


def test_a_run_can_be_read_while_it_goes_on(home, tmp_path):
    def in_two_steps(go: str) -> None:
        report(loss=1.0)
        print("one", flush=True)
        wait_for(go)
        report(loss=2.0)
        print("two", flush=True)

    run = launch(in_two_steps, 1, output="none", args=(str(tmp_path / "go"),))
    with contextlib.ExitStack() as stack:
        stack.callback(run.stop)
        wait_until(lambda: len(runs()))
        again = open_run(run.id)
        assert (again.state, again.ranks[0].state) == ("running", "running")
        wait_until(lambda: again.metrics)
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
def test_a_killed_kernel_leaves_a_run_that_is_lost(home):
    with Kernel() as kernel:
        run_id = evaluate(kernel, ENDLESS)
        again = wait_until(lambda: (home / run_id / "rank-1.log").exists() and open_run(run_id))
        assert again.state == "running"
        kernel.kill()
        wait_until(lambda: again.state == "lost")
    with Kernel() as other:
        code = f"from notebook_launcher import *\nrun = open_run({run_id!r})\n"
        code += "run.state, run.name, len(run.metrics), run.logs(0)[:7], [r.state for r in run.ranks], repr(runs())"
        state, name, num_metrics, text, states, table = evaluate(other, code)
    assert (state, name, text, states) == ("lost", "endless", "step 0\n", ["unknown"] * 2)
    assert num_metrics > 2
    assert re.search(rf"{run_id} .* lost ", table)
    assert again.snapshot().error == "the kernel ended before the run did"


LAUNCHES = """
from notebook_launcher import *
def speak(name):
    print(name)
if __name__ == "__main__":
    with Session(1, output="none") as session:
        for _ in range(20):
            session.run(speak, args=(NAME,))
"""


def test_two_kernels_write_side_by_side(home):
    codes = [LAUNCHES.replace("NAME", repr(name)) for name in ("one", "two")]
    programs = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for code in codes]
    assert [program.wait(timeout=50) for program in programs] == [0, 0]
    found = runs()
    assert sorted(run.logs(0) for run in found) == ["one\n"] * 20 + ["two\n"] * 20
    assert {run.state for run in found} == {"done"}


# What cannot be written.


def test_a_place_that_is_no_folder_is_said_once(home, capfd):
    home.write_text("a file")
    assert list(notebook_launch(speak, 1)) == [7]
    err = capfd.readouterr().err
    assert err.count("the run is not recorded any further") == 1
    assert f"in {home}: File exists" in err


def test_a_home_that_nobody_knows_is_said_once(monkeypatch, capfd):
    monkeypatch.delenv(folders.VARIABLE)
    assert list(notebook_launch(speak, 1, runs_folder="~nobody-at-all/runs")) == [7]
    assert capfd.readouterr().err.count("the run is not recorded any further: RuntimeError: Could not determine") == 1


def test_a_disk_that_fills_up_does_not_fail_the_run(home, tmp_path, capfd):
    def flood(go: str) -> str:
        print("before", flush=True)
        wait_for(go)
        for step in range(500):
            report(loss=float(step))
            print("x" * 100)
        wait_for(go + "on")
        return "well"

    run = launch(flood, 1, args=(str(tmp_path / "go"),), output="none")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack:
        stack.callback(run.stop)
        wait_until(lambda: len(runs()))
        # Ranks are born, so that the limit binds this process alone. Python ignores SIGXFSZ.
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        os.close(os.open(tmp_path / "go", os.O_CREAT))
        err = wait_until(lambda: capfd.readouterr().err)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        (tmp_path / "goon").touch()
        assert list(run.result(timeout=PATIENCE)) == ["well"]
    assert err.count("the run is not recorded any further") == 1
    assert f"in {home / run.id}: File too large" in err
    again = open_run(run.id)
    assert again.state == "done"
    assert again.ranks[0].metrics == {"loss": 499.0}
    assert [point.step for point in again.metrics] == list(range(len(again.metrics)))


# Floods.


def points(num: int, num_ranks: int = 2) -> list[MetricPoint]:
    """Two metrics, reported in turn by each rank."""
    return [
        MetricPoint(rank=rank, step=step, time=0.0, values={name: float(step)})
        for step in range(num)
        for rank in range(num_ranks)
        for name in ("loss", "rate")
    ]


def read_points(folder: Path) -> list[MetricPoint]:
    return list(RecordedRun(folder).metrics)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "20261121-142501-train-3f9c5e"
    folder.mkdir()
    return folder


def test_metrics_without_end_take_a_bounded_file(run_folder):
    file = MetricsFile(run_folder, limit=200_000)
    every = points(50_000)
    for start in range(0, len(every), 5_000):
        file.write(every[start : start + 5_000])
    size = (run_folder / folders.METRICS).stat().st_size
    assert 100_000 < size == file.size <= 200_000
    kept = read_points(run_folder)
    assert kept[:1000] == every[:1000]
    assert len(kept) + file.num_left_out == len(every)
    for rank in (0, 1):
        for name in ("loss", "rate"):
            steps = [point.step for point in kept if point.rank == rank and name in point.values]
            assert steps == sorted(set(steps))
            assert steps[-1] > 40_000, "the curve goes on to the end"


def test_one_huge_line_does_not_take_the_room_of_all(run_folder):
    file = MetricsFile(run_folder, limit=10_000)
    huge = MetricPoint(rank=0, step=0, time=0.0, values={f"metric {number}": 1.0 for number in range(1000)})
    small = MetricPoint(rank=0, step=1, time=0.0, values={"loss": 1.0})
    file.write([huge, small])
    assert read_points(run_folder) == [small]
    assert file.num_left_out == 1


def test_ten_thousand_metrics_a_second_are_encoded_in_a_fraction_of_it(run_folder):
    every = points(2_500)
    file = MetricsFile(run_folder)
    started = time.process_time()
    file.write(every)
    assert time.process_time() - started < 0.5
    assert read_points(run_folder) == every


def test_a_rank_that_reports_as_fast_as_it_can_is_recorded(home):
    def fast() -> None:
        for step in range(10_000):
            report(step=step, loss=1.0)

    run = launch(fast, 1, output="none")
    run.result(timeout=PATIENCE)
    assert [point.step for point in open_run(run.id).metrics] == list(range(10_000))


class Log:
    """A reader with the log of one rank."""

    def __init__(self) -> None:
        self.log = RankLog()

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        return self.log.since(position)

    def snapshot(self) -> Any:
        raise NotImplementedError

    def metrics_since(self, position: int) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("num_writes", [1, 7, 1000])
def test_a_log_without_end_keeps_its_beginning_and_its_end(num_writes, run_folder):
    reader, file = Log(), LogFile(run_folder, 0, 1, limit=100_000)
    lines = [f"line {number:08}\n" for number in range(50_000)]
    size = len(lines) // num_writes + 1
    for start in range(0, len(lines), size):
        reader.log.write("".join(lines[start : start + size]))
        file.write(reader)
    file.finish(reader)
    text = (run_folder / "rank-0.log").read_text()
    assert len(text) < 100_000 + files.TAIL_BYTES + 100
    assert text.startswith("".join(lines[:7000]))
    assert text.endswith("".join(lines[-4000:]))
    assert "[534.5 kB are left out here]" in text


def test_a_log_that_just_fits_is_whole(run_folder):
    reader, file = Log(), LogFile(run_folder, 0, 1, limit=100)
    reader.log.write("x" * 100)
    file.write(reader)
    file.finish(reader)
    assert (run_folder / "rank-0.log").read_text() == "x" * 100


# Making room.


def make_run(home: Path, number: int, *, size: int = 0, **summary: Any) -> Path:
    folder = home / f"20261121-{number:06}-train-00000{number % 10}"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_bytes(b"x" * size)
    data = {"name": "train", "state": "done", "started": number, "seconds": 1.0, "num_processes": 1}
    (folder / folders.SUMMARY).write_text(json.dumps({**data, "summary": "", "seed": 0, **summary}))
    return folder


def numbers(home: Path) -> list[int]:
    return [int(name.split("-")[1]) for name in folders.list_ids(home)]


def test_the_oldest_go_when_there_are_too_many(tmp_path):
    for number in range(1, 8):
        make_run(tmp_path, number)
    folders.prune(tmp_path, max_runs=3)
    assert numbers(tmp_path) == [7, 6, 5]


def test_the_oldest_go_when_they_are_too_large(tmp_path):
    for number, size in enumerate([10, 4000, 10, 3000], 1):
        make_run(tmp_path, number, size=size)
    folders.prune(tmp_path, max_bytes=5000)
    assert numbers(tmp_path) == [4, 3]


def test_the_newest_stays_however_large_it_is(tmp_path):
    make_run(tmp_path, 1, size=10_000)
    folders.prune(tmp_path, max_bytes=10)
    assert numbers(tmp_path) == [1]


def test_a_run_that_goes_on_stays(tmp_path):
    make_run(tmp_path, 1, state="running", kernel=owners.identify())
    make_run(tmp_path, 2, state="running", kernel={**owners.identify(), "start": 1})
    make_run(tmp_path, 3)
    make_run(tmp_path, 4)
    folders.prune(tmp_path, max_runs=2)
    assert numbers(tmp_path) == [4, 1]


def test_nothing_but_runs_is_removed(tmp_path):
    for number in range(1, 4):
        make_run(tmp_path, number)
    (tmp_path / "20261121-000001-train-000001" / "notes.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "a-file").touch()
    folders.prune(tmp_path, max_runs=1)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left[:2] == ["20261121-000001-train-000001/notes.txt", "20261121-000003-train-000003/rank-0.log"]
    assert (tmp_path / "data").is_dir()
    assert (tmp_path / "a-file").exists()


def test_a_launch_makes_room(home, monkeypatch):
    monkeypatch.setattr(folders, "MAX_RUNS", 3)
    monkeypatch.setattr(folders.prune, "__kwdefaults__", {"max_runs": 3, "max_bytes": None})
    for number in range(1, 6):
        make_run(home, number)
    run = launch(speak, 1, output="none")
    run.result()
    wait_until(lambda: len(runs()) == 3)
    assert runs()[0].id == run.id


# Who writes.


def test_a_process_lives_until_it_is_reaped_or_not():
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = {**owners.identify(), "pid": program.pid, "start": owners._start_of(program.pid)}
    assert owners.is_alive(owner, age=math.inf)
    assert not owners.is_alive({**owner, "start": 1}, age=0), "another process has the number"
    program.kill()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    assert not owners.is_alive(owner, age=0), "a zombie writes nothing"
    program.communicate()
    assert not owners.is_alive(owner, age=0)


@pytest.mark.parametrize("other", [{"boot": "another"}, {"pid_namespace": "pid:[1]"}])
def test_of_another_machine_the_time_of_its_last_word_counts(other):
    owner = {**owners.identify(), **other}
    assert owners.is_alive(owner, age=1)
    assert not owners.is_alive(owner, age=owners.SILENCE + 1)


@pytest.mark.parametrize("owner", [None, [], {}, "kernel"])
def test_who_is_not_named_is_dead(owner):
    assert not owners.is_alive(owner, age=math.inf)


# Opening and listing.


@pytest.mark.parametrize("end", [b'{"rank":0,"st', b"\x00\xff", b'{"rank":0,"step":9,"time":0.0,"values":{"loss":1.0}}'])
def test_a_torn_last_line_is_not_read(end, home):
    run = launch(speak, 1, output="none")
    run.result()
    again = open_run(run.id)
    with (again.folder / folders.METRICS).open("ab") as file:
        file.write(end)
    assert again.metrics == run.metrics


def test_lines_that_are_no_metrics_are_passed_over(home):
    run = launch(speak, 1, output="none")
    run.result()
    path = home / run.id / folders.METRICS
    good = path.read_bytes()
    path.write_bytes(b'\n[]\n{"rank":0}\nnonsense\n\xff\xfe\n{"values":3}\n' + good)
    assert open_run(run.id).metrics == run.metrics


def test_what_a_later_version_adds_is_ignored(home):
    run = launch(speak, 1, output="none")
    run.result()
    for name in (folders.CONFIG, folders.SUMMARY):
        path = home / run.id / name
        data = {**json.loads(path.read_text()), "hologram": {"depth": 3}}
        for rank in data.get("ranks", []):
            rank["mood"] = "good"
        path.write_text(json.dumps(data))
    path = home / run.id / folders.METRICS
    path.write_text("".join(f'{{"unit": "m", {line[1:]}\n' for line in path.read_text().splitlines()))
    again = open_run(run.id)
    assert (again.snapshot(), again.config, again.metrics) == (run.snapshot(), run.config, run.metrics)


@pytest.mark.parametrize("summary", [None, "", "{", "[]", '{"state": "done"}', '{"ranks": 3}'])
def test_a_folder_without_a_summary_is_a_run_that_was_lost(summary, home):
    folder = make_run(home, 123456)
    os.utime(folder, (0, 0))
    (folder / folders.SUMMARY).unlink()
    if summary is not None:
        (folder / folders.SUMMARY).write_text(summary)
    os.utime(folder, (0, 0))
    (run,) = runs()
    assert (run.state, run.name, len(run.ranks)) == ("lost", "train", 0)
    assert time.strftime("%Y%m%d-%H%M%S", time.localtime(run.snapshot().started)) == "20261121-123456"
    assert "lost" in run._repr_html_()
    assert "lost" in repr(runs())


def test_a_config_that_is_gone_is_in_the_summary(home):
    run = launch(speak, 1, output="none", seed=4)
    run.result()
    (home / run.id / folders.CONFIG).unlink()
    assert open_run(run.id).config == run.config


def test_a_run_is_found_by_the_beginning_of_its_id(tmp_path):
    for number in (100001, 100002, 110000):
        make_run(tmp_path, number)
    assert open_run("20261121-11", tmp_path).id == "20261121-110000-train-000000"
    assert open_run("20261121-100002-train-000002", tmp_path).snapshot().started == 100002


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("20261121-10", r"2 runs in .* begin with '20261121-10': 20261121-100002-train-000002, .*\. Type more of the id"),
        ("20261121-100009-train-000002", r"no run .* in .*closest are 20261121-100002-train-000002, .* lists all 3"),
        ("train", r"there is no run 'train' in .* The closest are "),
        ("", r"there is no run ''"),
    ],
)
def test_a_run_that_is_not_found_names_the_closest(name, message, tmp_path):
    for number in (100001, 100002, 110000):
        make_run(tmp_path, number)
    with pytest.raises(LookupError, match=message):
        open_run(name, tmp_path)


def test_what_holds_no_run_says_so(tmp_path):
    with pytest.raises(LookupError, match=rf"there is no run 'x': {tmp_path}/none holds none"):
        open_run("x", tmp_path / "none")
    with pytest.raises(LookupError, match=r"there is no folder .*/gone: the run was removed"):
        open_run(tmp_path / "gone")
    with pytest.raises(LookupError, match=r"holds no run: there is no summary.json in it"):
        open_run(str(tmp_path))
    with pytest.raises(TypeError, match=r"open_run\(3\): pass a run's id"):
        open_run(3)  # type: ignore[arg-type]


def test_a_folder_that_was_moved_can_be_opened(home, tmp_path):
    run = launch(speak, 1, output="none")
    run.result()
    moved = (home / run.id).rename(tmp_path / "the good one")
    assert open_run(moved).metrics == run.metrics
    assert open_run(str(moved)).id == "the good one"


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
    assert re.match(r"id +function +when +state +time +ranks", lines[1])
    assert lines[-1] == "and 4 older: runs()[16:]"
    assert len(lines) == 1 + 1 + 16 + 1


def test_runs_of_one_second_are_in_order(home):
    for name, started in (("b", 2.25), ("a", 2.75), ("c", 2.5)):
        folder = make_run(home, 2, started=started, name=name)
        folder.rename(home / f"20261121-000002-{name}-000000")
    assert [run.name for run in runs()] == ["a", "c", "b"]


def test_the_table_shows_the_last_metrics(home):
    notebook_launch(speak, 2, output="none")
    assert repr(runs()).splitlines()[-1].endswith("loss 0.5, accuracy 1")
    assert "loss 0.5, accuracy 1" in runs()._repr_html_()


def test_a_notebook_shows_a_recorded_run_as_a_page(home):
    notebook_launch(speak, 2, output="none")
    html = runs()[0]._repr_html_()
    assert "accuracy" in html
    assert "hello" in html


def test_the_names_are_public():
    assert {"RecordedRun", "open_run", "runs"} <= set(notebook_launcher.__all__)
