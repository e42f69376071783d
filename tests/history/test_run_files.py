"""The files of a run's folder: bounded, removed in turn, and known as alive or lost."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import RecordedRun
from notebook_launcher.history import owners, run_files, run_folders
from notebook_launcher.history.run_files import LogFile, MetricsFile
from notebook_launcher.history.schema import MetricPoint
from notebook_launcher.kernel.ranklog import RankLog
from tests.support.toy_runs import make_run

if TYPE_CHECKING:
    from pathlib import Path


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
    size = (run_folder / run_folders.METRICS).stat().st_size
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
    assert len(text) < 100_000 + run_files.TAIL_BYTES + 100
    assert text.startswith("".join(lines[:7000]))
    assert text.endswith("".join(lines[-4000:]))
    assert "[534 kB not recorded here]" in text


def test_a_log_that_just_fits_is_whole(run_folder):
    reader, file = Log(), LogFile(run_folder, 0, 1, limit=100)
    reader.log.write("x" * 100)
    file.write(reader)
    file.finish(reader)
    assert (run_folder / "rank-0.log").read_text() == "x" * 100


# Making room.


def numbers(home: Path) -> list[int]:
    return [int(name.split("-")[1]) for name in run_folders.list_ids(home)]


def test_the_oldest_go_when_there_are_too_many(tmp_path):
    for number in range(1, 8):
        make_run(tmp_path, number)
    run_folders.prune(tmp_path, max_runs=3)
    assert numbers(tmp_path) == [7, 6, 5]


def test_the_oldest_go_when_they_are_too_large(tmp_path):
    for number, size in enumerate([10, 4000, 10, 3000], 1):
        make_run(tmp_path, number, size=size)
    run_folders.prune(tmp_path, max_runs=9, max_bytes=5000)
    assert numbers(tmp_path) == [4, 3]


def test_the_newest_stays_however_large_it_is(tmp_path):
    make_run(tmp_path, 1, size=10_000)
    run_folders.prune(tmp_path, max_runs=9, max_bytes=10)
    assert numbers(tmp_path) == [1]


def test_a_run_that_goes_on_stays(tmp_path):
    make_run(tmp_path, 1, state="running", kernel=owners.identify())
    make_run(tmp_path, 2, state="running", kernel={**owners.identify(), "start": 1})
    make_run(tmp_path, 3)
    make_run(tmp_path, 4)
    run_folders.prune(tmp_path, max_runs=2)
    assert numbers(tmp_path) == [4, 1]


def test_nothing_but_runs_is_removed(tmp_path):
    for number in range(1, 4):
        make_run(tmp_path, number)
    (tmp_path / "20261121-000001-train-000001" / "notes.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "a-file").touch()
    run_folders.prune(tmp_path, max_runs=1)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left[:2] == ["20261121-000001-train-000001/notes.txt", "20261121-000003-train-000003/rank-0.log"]
    assert (tmp_path / "data").is_dir()
    assert (tmp_path / "a-file").exists()


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
