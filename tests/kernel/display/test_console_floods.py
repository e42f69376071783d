"""Floods of output: the lines for which a cell has room, and the logs of the ranks, which have all."""

from __future__ import annotations

import os
import tempfile

import pytest

from notebook_launcher.kernel.display import console, kept_lines
from notebook_launcher.kernel.display.console import Status, Text
from notebook_launcher.kernel.display.kept_lines import RankLog
from tests.support.console_cell import Cell


def gap_in(lines: list[str]) -> tuple[int, int]:
    """Return the place of the line about what is left out, and the number that it tells."""
    (gap,) = [place for place, line in enumerate(lines) if line.startswith("...")]
    left_out = int(lines[gap].split()[1].replace(",", ""))
    assert lines[gap] == f"... {left_out:,} lines of ranks 0, 1 left out here; run.logs(rank) has all ..."
    return gap, left_out


def kept(cell: Cell) -> list[str]:
    lines = cell.finish().splitlines()
    assert len(lines) <= 10_000
    assert sum(kept_lines.num_bytes(line + "\n") for line in lines) <= 1_000_000
    return lines


def flood(cell: Cell, num_lines: int, width: int = 0) -> None:
    for start in range(0, num_lines, 1000):
        cell.feed("".join(f"{n:{width}}\n" for n in range(start, start + 1000)), rank=start // 1000 % 2)
        if cell.kept_in and start % 20_000 == 0:
            cell.tick()


@pytest.mark.parametrize(("kept_in", "width"), [(None, 10), ("run.logs(rank)", 10), ("run.logs(rank)", 300)])
def test_beginning_and_end_of_a_flood_are_shown_and_the_rest_is_counted(kept_in, width):
    cell, num_lines = Cell(2, kept_in=kept_in), 200_000
    flood(cell, num_lines, width)
    lines = cell.finish().splitlines() if kept_in is None else kept(cell)
    _, left_out = gap_in(lines)
    assert len(lines) - 1 + left_out == num_lines
    assert [int(line.removeprefix("[rank 0]")) for line in lines[:1000]] == list(range(1000))
    assert [int(line.removeprefix("[rank 1]")) for line in lines[-700:]] == list(range(num_lines - 700, num_lines))
    assert len(lines) > 9_000 or width == 300
    assert sum(map(len, lines)) > 700_000 or (kept_in and width == 10)
    assert sum(log.text().count("\n") for log in cell.console.logs) == num_lines


def test_very_long_line_is_cut_and_takes_no_memory():
    cell = Cell()
    for _ in range(160):
        cell.feed("x" * 65_536)
    assert sum(map(len, cell.console._sources[0, "stdout"].screen._rows)) == console.LINE_LIMIT
    cell.feed("\nnext\n" + "y" * 100_000 + "\n")  # The second one arrives whole.
    first, following, second = cell.finish().splitlines()
    assert first.endswith("x ... [10,452,992 more characters in this line]")
    assert (following, second) == ("next", f"{'y' * console.LINE_LIMIT} ... [67,232 more characters in this line]")
    assert len(first) < console.LINE_LIMIT + 100
    assert len(cell.console.logs[0].text()) == 160 * 65_536 + 6 + 100_001


# What stays in a cell.


def test_cell_that_has_room_for_everything_leaves_nothing_out():
    cell = Cell(4, kept_in="run.logs(rank)")
    for start in range(0, 9000, 100):
        for rank in range(4):  # The same lines of all ranks count once.
            cell.feed("".join(f"line {number}\n" for number in range(start, start + 100)), rank)
        if start < 4000:
            cell.tick()
    assert kept(cell)[:4000] == [f"[ranks 0-3] line {number}" for number in range(4000)]


def test_flood_shows_its_newest_lines_live_and_how_many_wait():
    cell = Cell(kept_in="run.logs(rank)")
    for number in range(10):
        cell.feed("".join(f"line {line}\n" for line in range(number * 1000, number * 1000 + 1000)))
        messages = cell.tick()
    (status,) = messages
    assert isinstance(status, Status)
    heading, *newest = status.text.splitlines()
    assert heading == "... 5,500 more lines; the newest:"
    assert newest == [f"line {line}" for line in range(9988, 10_000)]
    cell.finish()
    assert cell.batches[-1][-1] == Status("")


@pytest.mark.parametrize("kept_in", [None, "run.logs(rank)"])
def test_warnings_and_notices_in_the_middle_of_a_flood_are_kept(kept_in):
    cell = Cell(kept_in=kept_in)
    for number in range(100):
        cell.feed("x" * 99 + "\n" * 1000)
        cell.feed(f"warning {number}\n", stream="stderr")
        cell.console.notice(f"notice {number}")
        cell.feed(("y" * 99 + "\n") * 1000)
        cell.tick()
    lines = cell.finish().splitlines() if kept_in is None else kept(cell)
    assert {f"{what} {number}" for what in ("warning", "notice") for number in range(100)} < set(lines)


def test_cleared_cell_has_all_its_room_again():
    cell = Cell(kept_in="run.logs(rank)")
    for epoch in range(5):
        cell.feed("before\n" * 9000)
        cell.tick()
        cell.console.clear()
        cell.feed(f"epoch {epoch}\n")
        assert Text("stdout", f"epoch {epoch}\n") in cell.tick()
    assert "left out" not in cell.finish().rpartition("epoch 3")[2]


def test_line_that_is_larger_than_the_room_is_left_out_alone():
    cell = Cell(kept_in="run.logs(rank)")
    for _ in range(40):
        cell.feed("x" * 40_000 + "\n")
    cell.feed("last\n")
    lines = kept(cell)
    assert lines[-1] == "last"
    assert any("left out here" in line for line in lines)


def test_the_launchers_last_line_comes_after_the_end_of_each_rank():
    cell = Cell(2, kept_in="run.logs(rank)")
    cell.console.notice("f: 2 CPU ranks")
    for rank in range(2):  # At once, as in a run that ends before the first tick.
        cell.feed("".join(f"line {n} of {rank}\n" for n in range(12_000)) + f"the end of {rank}\n", rank)
    cell.console.finish()
    cell.console.notice("f: done in 703 ms")
    lines = kept(cell)
    gap, left_out = gap_in(lines)
    assert (lines[0], left_out) == ("f: 2 CPU ranks", 14_502)
    for rank in range(2):
        assert [f"[rank {rank}] line 11999 of {rank}", f"[rank {rank}] the end of {rank}"] == [
            line for line in lines if f"of {rank}" in line
        ][-2:]
        assert sum(line.startswith(f"[rank {rank}]") for line in lines[gap:]) == pytest.approx(2500, abs=1)
    assert lines[-1] == "f: done in 703 ms"


@pytest.mark.parametrize("kept_in", [None, "run.logs(rank)"])
def test_no_flood_of_one_rank_takes_another_ranks_end(kept_in):
    cell = Cell(2, kept_in=kept_in)
    for number in range(100):
        cell.feed(f"{number:0100}\n" * 2000)
        if number == 97:
            cell.feed("the end\n", rank=1)
    cell.console.finish()
    cell.console.notice("done")
    lines = cell.finish().splitlines()
    assert "[rank 1] the end" in lines
    assert lines[-2:] == [f"[rank 0] {99:0100}", "done"]


def test_each_of_many_ranks_keeps_its_end_while_the_cell_stays_bounded():
    cell = Cell(64, kept_in="run.logs(rank)")
    for number in range(20):
        for rank in range(64):
            cell.feed("".join(f"{n} of round {number} on {rank}\n" for n in range(500)), rank)
        if number % 3 == 0:
            cell.tick()
    for rank in range(0, 64, 2):
        cell.feed(f"the end of {rank}\n", rank)
    lines = kept(cell)
    assert {f"[rank {rank}] the end of {rank}" for rank in range(0, 64, 2)} < set(lines)
    assert {f"[rank {rank}] 499 of round 19 on {rank}" for rank in range(64)} < set(lines)
    left_out = sum(int(line.split()[1].replace(",", "")) for line in lines if line.startswith("..."))
    assert len(lines) - 1 + left_out == 64 * 20 * 500 + 32


# The whole output of each rank.


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


@pytest.mark.parametrize("folder", ["", "missing"], ids=["in a file", "where no file can be made"])
def test_long_log_leaves_no_file_with_a_name_and_stays_in_memory_where_none_can_be_made(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    log = RankLog()
    for number in range(50):
        log.write(f"é{number}" * 30_000 + "\n")
    assert (len(log._memory) <= kept_lines.SPOOL_LIMIT) is not bool(folder)
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    assert log.text() == "".join(f"é{number}" * 30_000 + "\n" for number in range(50))
    assert log.tail(1) == ("é49" * 30_000,)
