"""The files of a run's folder: bounded, removed in turn, and known as alive or lost."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import RecordedRun
from notebook_launcher.history import run_files, run_folders
from notebook_launcher.history.run_files import LogFile, MetricsFile
from notebook_launcher.history.schema import MetricPoint
from notebook_launcher.kernel.display.kept_lines import RankLog
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


def test_endless_metrics_take_a_bounded_file(run_folder):
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


def test_huge_line_leaves_room_for_later_lines(run_folder):
    file = MetricsFile(run_folder, limit=10_000)
    huge = MetricPoint(rank=0, step=0, time=0.0, values={f"metric {number}": 1.0 for number in range(1000)})
    small = MetricPoint(rank=0, step=1, time=0.0, values={"loss": 1.0})
    file.write([huge, small])
    assert read_points(run_folder) == [small]
    assert file.num_left_out == 1


class Log:
    """A reader with the log of one rank."""

    def __init__(self) -> None:
        self.log = RankLog()

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        return self.log.since(position)


@pytest.mark.parametrize("num_writes", [1, 1000])
def test_endless_log_keeps_its_beginning_and_its_end(num_writes, run_folder):
    reader: Any = Log()
    file = LogFile(run_folder, 0, 1, limit=100_000)
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


# Making room.


def numbers(home: Path) -> list[int]:
    return [int(name.split("-")[1]) for name in run_folders.list_ids(home)]


@pytest.mark.parametrize(
    ("sizes", "max_runs", "max_bytes", "left"),
    [
        ([10] * 7, 3, 10**6, [7, 6, 5]),
        ([10, 4000, 10, 3000], 9, 5000, [4, 3]),
        ([10_000], 9, 10, [1]),  # The newest run stays whatever its size.
    ],
)
def test_prune_removes_the_oldest_of_too_many_or_too_large_runs(sizes, max_runs, max_bytes, left, tmp_path):
    for number, size in enumerate(sizes, 1):
        make_run(tmp_path, number, size=size)
    run_folders.prune(tmp_path, max_runs=max_runs, max_bytes=max_bytes)
    assert numbers(tmp_path) == left


def test_prune_keeps_a_live_run(tmp_path):
    make_run(tmp_path, 1, state="running", kernel=run_folders.identify())
    make_run(tmp_path, 2, state="running", kernel={**run_folders.identify(), "start": 1})
    make_run(tmp_path, 3)
    make_run(tmp_path, 4)
    run_folders.prune(tmp_path, max_runs=2)
    assert numbers(tmp_path) == [4, 1]


def test_prune_removes_only_files_of_runs(tmp_path):
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


def test_process_is_alive_until_it_ends_reaped_or_not():
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = {**run_folders.identify(), "pid": program.pid, "start": run_folders.start_of(program.pid)}
    assert run_folders.is_alive(owner, age=math.inf)
    assert not run_folders.is_alive({**owner, "start": 1}, age=0), "another process has the number"
    program.kill()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    assert not run_folders.is_alive(owner, age=0), "a zombie writes nothing"
    program.communicate()
    assert not run_folders.is_alive(owner, age=0)


@pytest.mark.parametrize("other", [{"boot": "another"}, {"pid_namespace": "pid:[1]"}])
def test_owner_on_another_machine_is_alive_while_it_writes(other):
    owner = {**run_folders.identify(), **other}
    assert run_folders.is_alive(owner, age=1)
    assert not run_folders.is_alive(owner, age=run_folders.SILENCE + 1)


@pytest.mark.parametrize("owner", [None, [], {}, "kernel"])
def test_invalid_owner_is_not_alive(owner):
    assert not run_folders.is_alive(owner, age=math.inf)
