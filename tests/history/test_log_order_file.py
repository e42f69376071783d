"""The order in which the output of different ranks arrived, kept in the run's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from notebook_launcher import RecordedRun, launch
from notebook_launcher.history import run_files
from notebook_launcher.history.run_files import LogOrderFile, read_log_order
from notebook_launcher.history.run_folders import LOG_ORDER
from notebook_launcher.widgets.monitor.feed import Feed

if TYPE_CHECKING:
    from pathlib import Path


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


def test_piece_that_grows_between_two_writes_stays_one(tmp_path: Path) -> None:
    file, reader = LogOrderFile(tmp_path), Order()
    given: Any = reader
    for reader.pieces in ([(0, 5)], [(0, 9)], [(0, 9)], [(0, 9), (1, 3), (0, 12)]):
        file.write(given)
    assert read_log_order(tmp_path, 10) == [(0, 9), (1, 3), (0, 12)]
    assert read_log_order(tmp_path, 2) == [(1, 3), (0, 12)]


def test_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MAX_BYTES", 20)
    file, reader = LogOrderFile(tmp_path), Order()
    given: Any = reader
    for number in range(100):
        reader.pieces.append((number % 2, number + 1))
        file.write(given)
    assert 20 < (tmp_path / LOG_ORDER).stat().st_size < 30
    assert read_log_order(tmp_path, 100) == [(0, 1), (1, 2), (0, 3), (1, 4), (0, 5), (1, 6)]


@pytest.mark.parametrize("content", [b"", b"nonsense\n", b"0 1 2\n", b"\xff\n"])
def test_file_that_another_program_changed_counts_as_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOG_ORDER).write_bytes(content)
    assert read_log_order(tmp_path, 5) == []
