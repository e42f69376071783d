"""The files of a run's folder: when they are written, bounded, removed in turn, and known as alive or lost."""

from __future__ import annotations

import collections
import math
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from notebook_launcher import RecordedRun, launch
from notebook_launcher.history import run_files, run_folders
from notebook_launcher.history.recorder import FIRST_AFTER, MAX_SHARE, Recorder
from notebook_launcher.history.run_files import LogFile, LogOrderFile, MetricsFile, read_log_order
from notebook_launcher.history.run_folders import LOG_ORDER
from notebook_launcher.history.schema import MetricPoint
from notebook_launcher.kernel.display.kept_lines import RankLog
from notebook_launcher.widgets.monitor.feed import Feed
from tests.support.toy_runs import make_run, speak

if TYPE_CHECKING:
    from pathlib import Path

    from notebook_launcher.kernel.run.handle import Run


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
    assert not any(
        run_folders.is_alive(invalid, age=math.inf) for invalid in (None, list[int](), dict[str, int](), "kernel")
    )


@pytest.mark.parametrize("other", [{"boot": "another"}, {"pid_namespace": "pid:[1]"}])
def test_owner_on_another_machine_is_alive_while_it_writes(other):
    owner = {**run_folders.identify(), **other}
    assert run_folders.is_alive(owner, age=1)
    assert not run_folders.is_alive(owner, age=run_folders.SILENCE + 1)


def speak_in_turns(num: int) -> None:
    for number in range(num):
        if dist.get_rank() == number % 2:
            print(number, flush=True)
        dist.barrier()


class Order:
    """A reader that knows the order of output, and nothing else."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def log_order(self, num_pieces: int) -> list[tuple[int, int]]:
        return self.pieces[-num_pieces:]


def test_recorded_run_shows_the_output_of_all_ranks_in_the_order_of_arrival(tmp_path: Path) -> None:
    run = launch(speak_in_turns, 2, args=(6,), output="none", runs_folder=tmp_path, devices="cpu")
    run.result(60)
    recorded = RecordedRun(tmp_path / run.id)
    # Two outputs that the kernel finds at the same time count in the order of their ranks.
    assert recorded.log_order(100) == run.log_order(100) != []
    assert Feed(recorded).reset()["logs"] == Feed(run).reset()["logs"]


def test_order_keeps_a_growing_piece_as_one_and_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader: Any = Order()
    file = LogOrderFile(tmp_path)
    for reader.pieces in ([(0, 5)], [(0, 9)], [(0, 9)], [(0, 9), (1, 3), (0, 12)]):
        file.write(reader)
    assert read_log_order(tmp_path, 10) == [(0, 9), (1, 3), (0, 12)]
    assert read_log_order(tmp_path, 2) == [(1, 3), (0, 12)]
    monkeypatch.setattr(run_files, "MAX_BYTES", 40)
    for number in range(100):
        reader.pieces.append((number % 2, number + 13))
        file.write(reader)
    assert 40 < (tmp_path / LOG_ORDER).stat().st_size < 50
    assert read_log_order(tmp_path, 100)[2:] == [(0, 13), (1, 14), (0, 15), (1, 16), (0, 17)]
    for content in (b"", b"nonsense\n", b"0 1 2\n", b"\xff\n"):  # As another program may leave it.
        (tmp_path / LOG_ORDER).write_bytes(content)
        assert read_log_order(tmp_path, 5) == []


@pytest.fixture(scope="module")
def run() -> Run:
    run = launch(speak, 1, output="none", runs_folder=None)
    run.result(60)
    return run


class SlowReader:
    """A run of which one part takes some time to read, as with a thousand ranks."""

    def __init__(self, run: Run, slow: str, seconds: float) -> None:
        self.num_reads: collections.Counter[str] = collections.Counter()
        self._run, self._slow, self._seconds = run, slow, seconds

    def __getattr__(self, name: str) -> Any:
        self.num_reads[name] += 1
        if name == self._slow:
            time.sleep(self._seconds)
        return getattr(self._run, name)


@pytest.mark.parametrize(
    ("part", "seconds", "num_writes"), [("snapshot", 0.0, 2), ("snapshot", 0.3, 1), ("metrics_since", 0.3, 1)]
)
def test_slow_writes_become_rare(run: Run, part: str, seconds: float, num_writes: int, tmp_path: Path) -> None:
    reader = SlowReader(run, part, seconds)
    recorder = Recorder(reader, tmp_path, time.monotonic() - FIRST_AFTER, say=print)
    for passed in (0.0, 0.8 * 0.3 / MAX_SHARE):
        recorder.note()
        recorder.tick(time.monotonic() + passed)
    assert reader.num_reads[part] == num_writes
