"""The log of a rank: all of its output, in memory or in a file without a name."""

from __future__ import annotations

import os
import tempfile

import pytest

from notebook_launcher.kernel.display import kept_lines
from notebook_launcher.kernel.display.kept_lines import RankLog
from tests.support.console_cell import Cell


def test_order_of_arrival_is_known_for_the_newest_output():
    cell = Cell(num_processes=3, output="rank0")
    cell.feed("old\n", rank=2)
    for number in range(2 * kept_lines.MAX_PIECES):
        cell.feed(f"é {number}\n", rank=number % 2)
    cell.feed("")
    cell.feed("a", rank=1)
    cell.feed("b\n", rank=1, stream="stderr")
    ends = [len(log.text().encode()) for log in cell.console.logs]
    before = ends[1] - len("ab\n") - len(f"é {2 * kept_lines.MAX_PIECES - 1}\n".encode())
    assert cell.console.order.pieces(3) == [(1, before), (0, ends[0]), (1, ends[1])]
    assert len(cell.console.order.pieces(10**9)) == kept_lines.MAX_PIECES


@pytest.mark.parametrize("num_lines", [0, 1, 3, 5000, 10**6])
def test_tail_returns_the_last_lines_of_a_log(num_lines):
    log = RankLog()
    lines = [f"line {number}" for number in range(200_000)]
    log.write("\n".join(lines) + "\n")
    log.write("last\n")
    assert log.tail(num_lines) == tuple([*lines, "last"][-num_lines:] if num_lines else [])


def test_log_leaves_memory_and_no_file_with_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = RankLog()
    for _ in range(50):
        log.write("é" * 50_000)
    assert len(log._memory) <= kept_lines.SPOOL_LIMIT
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    assert log.text() == "é" * 2_500_000


def test_log_stays_in_memory_where_no_file_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    log = RankLog()
    for number in range(3):
        log.write(f"{number}" * 1_000_000 + "\n")
    assert len(log.text()) == 3_000_003
    assert log.tail(1) == ("2" * 1_000_000,)
