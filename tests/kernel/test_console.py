"""From the bytes of the ranks' pipes to the messages of the cell."""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile

import pytest

from notebook_launcher.kernel.display import backlog, console, ranklog, screen, text_block
from notebook_launcher.kernel.display.console import Console, RankLog, Status, Text
from notebook_launcher.kernel.display.folding import label
from notebook_launcher.kernel.display.screen import Screen
from notebook_launcher.units import rank_list


@dataclasses.dataclass
class Cell:
    """A console, its clock, and what a cell would show."""

    num_processes: int = 1
    output: str = "all"
    now: float = 0.0
    kept_in: str | None = None

    def __post_init__(self) -> None:
        self.console = Console(self.num_processes, self.output, kept_in=self.kept_in)  # type: ignore[arg-type]
        self.batches: list[list[console.Message]] = []

    def feed(self, text: str | bytes, rank: int = 0, stream: str = "stdout") -> None:
        data = text.encode() if isinstance(text, str) else text
        self.console.feed(rank, stream, data)  # type: ignore[arg-type]

    def tick(self) -> list[console.Message]:
        """Let the clock run until something is published."""
        while (due := self.console.next_due(self.now)) is not None:
            self.now += due
            if messages := self.console.take(self.now):
                self.batches.append(messages)
                return messages
        return []

    def finish(self) -> str:
        """Return all text that the cell has shown, with what `finish` adds."""
        self.console.finish()
        while self.tick():
            pass
        return "".join(message.text for batch in self.batches for message in batch if isinstance(message, Text))


def test_first_line_is_published_at_once_and_the_next_a_tick_later():
    cell = Cell()
    cell.feed("a\n")
    assert cell.console.next_due(0.0) == 0
    assert cell.console.take(0.0) == [Text("stdout", "a\n")]
    cell.feed("b\n")
    assert cell.console.next_due(0.1) == pytest.approx(0.15)
    assert cell.console.take(0.1) == []
    assert cell.console.take(0.25) == [Text("stdout", "b\n")]
    assert cell.console.next_due(0.25) is None


def test_force_does_not_wait_for_the_tick():
    cell = Cell(2)
    cell.feed("a\n")
    assert cell.console.take(0.0, force=True) == [Text("stdout", "[rank 0] a\n")]


def test_nothing_is_due_without_output():
    assert Console(2).next_due(1.0) is None
    assert Console(2).take(1.0) == []


def test_line_in_pieces_stays_whole():
    cell = Cell()
    for piece in ("one", " li", "ne\nan"):
        cell.feed(piece)
    assert cell.tick() == [Text("stdout", "one line\n")]
    assert cell.finish() == "one line\nan\n"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_may_be_split_over_chunks(size):
    cell = Cell()
    data = "héllo € 😀\n".encode()
    for start in range(0, len(data), size):
        cell.feed(data[start : start + size])
        cell.feed("", stream="stderr")
    assert cell.finish() == "héllo € 😀\n"
    assert cell.console.logs[0].text() == "héllo € 😀\n"


def test_bytes_that_are_not_utf8_are_replaced():
    cell = Cell()
    cell.feed(b"\xff\xfeok\n")
    cell.feed(b"cut \xe2\x82")
    assert cell.finish() == "\ufffd\ufffdok\ncut \ufffd\n"


def test_labels_name_the_rank_unless_there_is_only_one():
    one, two = Cell(1), Cell(2)
    one.feed("a\nb\n")
    two.feed("a\nb\n", rank=1)
    assert one.finish() == "a\nb\n"
    assert two.finish() == "[rank 1] a\n[rank 1] b\n"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([1], "rank 1"), ([0, 1], "ranks 0, 1"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7")],
)
def test_rank_list_joins_consecutive_ranks(ranks, text):
    assert rank_list(ranks) == text
    assert label(ranks) == f"[{text.replace(', ', ',')}] "


def test_same_line_of_several_ranks_is_shown_once():
    cell = Cell(4)
    for rank in (2, 0, 1, 3):
        cell.feed(f"hello\nI am {rank}\nbye\n", rank)
    assert cell.finish() == (
        "[ranks 0-3] hello\n[rank 2] I am 2\n[rank 0] I am 0\n[rank 1] I am 1\n[rank 3] I am 3\n[ranks 0-3] bye\n"
    )


def test_first_line_waits_a_moment_for_the_other_ranks():
    cell = Cell(2)
    cell.feed("hello\n", 0)
    due = cell.console.next_due(0.0)
    assert due is not None
    assert 0 < due <= console.GATHER
    cell.feed("hello\n", 1)
    assert cell.console.next_due(0.0) == 0
    assert cell.tick() == [Text("stdout", "[ranks 0,1] hello\n")]


def test_same_text_on_another_stream_is_another_line():
    cell = Cell(2)
    cell.feed("x\n", 0)
    cell.feed("x\n", 1, "stderr")
    assert cell.tick() == [Text("stdout", "[rank 0] x\n"), Text("stderr", "[rank 1] x\n")]


def test_lines_that_differ_keep_the_order_of_arrival():
    cell = Cell(2)
    for step in range(3):
        cell.feed(f"a{step}\n", 0)
        cell.feed(f"b{step}\n", 1)
    assert cell.finish().replace("[rank 0] ", "").replace("[rank 1] ", "") == "a0\nb0\na1\nb1\na2\nb2\n"


def test_folding_never_changes_the_order_of_a_ranks_own_lines():
    random.seed(0)
    for _ in range(200):
        cell = Cell(3)
        written: dict[int, list[str]] = {0: [], 1: [], 2: []}
        for _ in range(30):
            rank, line = random.randrange(3), random.choice(["a", "b", "c", "", "d"])
            cell.feed(line + "\n", rank)
            written[rank].append(line)
        shown: dict[int, list[str]] = {0: [], 1: [], 2: []}
        for line in cell.finish().removesuffix("\n").split("\n"):
            head, _, text = line.partition("] ")
            for rank, lines in shown.items():
                if str(rank) in head or head == "[ranks 0-2":
                    lines.append(text)
        assert shown == written


def test_streams_of_one_rank_keep_their_order():
    cell = Cell()
    cell.feed("1\n")
    cell.feed("2\n", stream="stderr")
    cell.feed("3\n")
    cell.feed("4\n")
    assert cell.tick() == [Text("stdout", "1\n"), Text("stderr", "2\n"), Text("stdout", "3\n4\n")]


def test_many_changes_of_stream_do_not_make_many_messages():
    cell = Cell()
    for number in range(100):
        cell.feed(f"{number}\n", stream=("stdout", "stderr")[number % 2])
    messages = cell.tick()
    assert len(messages) == console.MAX_TEXTS
    assert "".join(message.text for message in messages) == "".join(f"{number}\n" for number in range(100))


def test_notices_have_no_label_and_keep_their_place():
    cell = Cell(2)
    cell.feed("a\n", 1)
    cell.console.notice("2 CPU ranks, gloo; no GPU found")
    cell.feed("b\n", 1)
    assert cell.finish() == "[rank 1] a\n2 CPU ranks, gloo; no GPU found\n[rank 1] b\n"


@pytest.mark.parametrize(("output", "shown"), [("all", "[ranks 0,1] x\n"), ("rank0", "[rank 0] x\n"), ("none", "")])
def test_output_option_selects_ranks_and_logs_have_all_lines(output, shown):
    cell = Cell(2, output)
    cell.feed("x\n", 0)
    cell.feed("x\n", 1)
    assert cell.finish() == shown
    assert [log.text() for log in cell.console.logs] == ["x\n", "x\n"]


def test_notices_are_shown_when_no_output_is():
    cell = Cell(2, "none")
    cell.console.notice("stopped")
    assert cell.tick() == [Text("stdout", "stopped\n")]


# Progress bars.


def test_bar_is_one_live_line_and_its_last_state_a_normal_line():
    cell = Cell()
    for percent in (0, 10):
        cell.feed(f"\r{percent} %", stream="stderr")
    assert cell.tick() == [Status("10 %")]
    cell.feed("\r50 %", stream="stderr")
    assert cell.tick() == [Status("50 %")]
    cell.feed("\r100 %\n", stream="stderr")
    assert cell.finish() == "100 %\n"
    assert cell.batches[-1][-1] == Status("")


def test_bar_ends_on_standard_output_and_warning_on_standard_error():
    cell = Cell()
    cell.feed("\r100 %\ncareful\n", stream="stderr")
    cell.finish()
    texts = [message for batch in cell.batches for message in batch if isinstance(message, Text)]
    assert texts == [Text("stdout", "100 %\n"), Text("stderr", "careful\n")]


@pytest.mark.parametrize("num_ticks", [1, 2, 3])
def test_text_printed_after_a_bar_comes_after_the_bar(num_ticks):
    cell = Cell()
    for epoch in range(3):
        cell.feed(f"\repoch {epoch}: 50 %", stream="stderr")
        cell.tick()
        cell.feed(f"loss {epoch}\n")  # The two streams arrive in any order.
        cell.feed(f"\repoch {epoch}: 100 %\n", stream="stderr")
        for _ in range(num_ticks):
            cell.tick()
    lines = [line for epoch in range(3) for line in (f"epoch {epoch}: 100 %", f"loss {epoch}")]
    assert cell.finish().splitlines() == lines


def test_nested_bars_share_the_live_row_of_their_rank():
    cell = Cell(2)
    for rank in range(2):
        cell.feed("\repoch 1/3", rank, "stderr")
        cell.feed(f"\n\rbatch {rank}/9\x1b[A", rank, "stderr")
    assert cell.tick() == [Status("[rank 0] epoch 1/3  ·  batch 0/9\n[rank 1] epoch 1/3  ·  batch 1/9")]


def test_hiding_the_cursor_leaves_no_line():
    cell = Cell()
    cell.feed("\x1b[?25lworking\n\x1b[?25h")
    assert cell.finish() == "working\n"


def test_bar_that_puts_its_return_last_is_live_too():
    cell = Cell()
    cell.feed("10 %\r20 %\r")
    assert cell.tick() == [Status("20 %")]
    cell.feed("done\n")
    assert cell.finish() == "done\n"


def test_bar_that_erases_itself_leaves_nothing():
    cell = Cell()
    cell.feed("\r100 %")
    assert cell.tick() == [Status("100 %")]
    cell.feed("\r      \r")
    assert cell.tick() == [Status("")]
    assert cell.finish() == ""


def test_bars_of_all_ranks_share_the_live_area():
    cell = Cell(3)
    for rank, percent in enumerate((10, 10, 20)):
        cell.feed(f"\r{percent} %", rank, "stderr")
    assert cell.tick() == [Status("[ranks 0,1] 10 %\n[rank 2] 20 %")]


def test_printing_beside_a_bar_leaves_the_bar_live():
    cell = Cell()
    cell.feed("\r10 %", stream="stderr")
    cell.feed("loss 0.1\n")
    assert cell.tick() == [Text("stdout", "loss 0.1\n"), Status("10 %")]


def test_nested_bars_of_tqdm_end_as_one_line_each():
    cell = Cell()

    def write(*pieces: str) -> None:
        for piece in pieces:
            cell.feed(piece, stream="stderr")

    write("\router 0/2", "\n", "\rinner 0/9", "\x1b[A")
    assert cell.tick() == [Status("outer 0/2  ·  inner 0/9")]
    write("\n", "\rinner 5/9", "\x1b[A")
    assert cell.tick() == [Status("outer 0/2  ·  inner 5/9")]
    write("\n", "\r         ", "\r\x1b[A", "\router 2/2", "\n")
    assert cell.finish() == "outer 2/2\n"


NESTED = ("\router 0/2", "\n", "\rinner 0/9", "\x1b[A", "\n", "\rinner 1/9", "\x1b[A")


@pytest.mark.parametrize("place", range(len(NESTED)))
def test_tick_in_the_middle_of_a_nested_redraw_ends_no_bar(place):
    cell = Cell()
    for number, piece in enumerate(NESTED):
        cell.feed(piece, stream="stderr")
        if number == place:
            assert [type(message) for message in cell.tick()] == [Status]
    cell.feed("\router 2/2\n", stream="stderr")
    assert cell.finish() == "outer 2/2\ninner 1/9\n"


def test_windows_line_ends_and_colours_pass_through():
    cell = Cell()
    cell.feed("\x1b[31mred\x1b[0m\r\nnext\r\n")
    assert cell.tick() == [Text("stdout", "\x1b[31mred\x1b[0m\nnext\n")]


def test_unfinished_line_becomes_live_only_when_it_stays():
    cell = Cell()
    cell.feed("a\nloading ...")
    assert cell.tick() == [Text("stdout", "a\n")]
    assert cell.tick() == [Status("loading ...")]
    cell.feed(" done\n")
    assert cell.tick() == [Text("stdout", "loading ... done\n"), Status("")]


def test_live_area_is_bounded():
    cell = Cell(100)
    for rank in range(100):
        cell.feed(f"\r{rank} " + "x" * 1000, rank)
    (status,) = cell.tick()
    lines = status.text.split("\n")
    assert len(lines) == console.STATUS_ROWS
    assert lines[-1] == f"... and {100 - console.STATUS_ROWS + 1} more"
    assert max(map(len, lines)) < 300


def test_finish_of_one_rank_ends_its_lines_alone():
    cell = Cell(2)
    cell.feed("\r10 %", 0)
    cell.feed("\r20 %", 1)
    cell.tick()
    cell.console.finish(rank=0)
    assert cell.tick() == [Text("stdout", "[rank 0] 10 %\n"), Status("[rank 1] 20 %")]


def test_finish_is_due_at_once_and_the_console_remains_usable():
    cell = Cell()
    cell.feed("a\n")
    cell.tick()
    cell.feed("b")
    cell.console.finish()
    assert cell.console.take(cell.now) == [Text("stdout", "b\n")]
    cell.feed("c\n")
    assert cell.finish().endswith("c\n")


# Floods.


def test_middle_of_a_flood_is_left_out_and_counted():
    cell = Cell(2)
    num_lines = 200_000
    for start in range(0, num_lines, 1000):
        cell.feed("".join(f"line {number}\n" for number in range(start, start + 1000)), rank=start // 1000 % 2)
    shown = cell.finish().splitlines()
    (gap,) = [place for place, line in enumerate(shown) if line.startswith("...")]
    left_out = int(shown[gap].split()[1].replace(",", ""))
    assert shown[gap] == f"... {left_out:,} lines of ranks 0, 1 left out here; run.logs(rank) has all ..."
    assert len(shown) - 1 + left_out == num_lines
    assert shown[0] == "[rank 0] line 0"
    assert shown[-1] == f"[rank 1] line {num_lines - 1}"
    assert sum(log.text().count("\n") for log in cell.console.logs) == num_lines


def test_lasting_flood_stays_below_the_rate_that_jupyter_allows():
    cell = Cell()
    sizes = []
    for _ in range(80):  # 20 s of 4 MB/s
        cell.feed("0123456789abcde\n" * 62_500)
        cell.tick()
        sizes.append(sum(text_block.num_bytes(message.text) for message in cell.batches[-1]))
        cell.now += 0.001
    assert cell.now == pytest.approx(20, rel=0.05)
    window = int(3 / console.TICK) + 1
    assert max(sum(sizes[start : start + window]) for start in range(80)) < 3_000_000
    assert sum(sizes) > 10_000_000


def test_notices_survive_a_flood():
    cell = Cell()
    for number in range(100):
        cell.feed("x" * 99 + "\n" * 1000)
        cell.console.notice(f"notice {number}")
        cell.feed(("y" * 99 + "\n") * 1000)
    shown = cell.finish()
    assert all(f"notice {number}\n" in shown for number in range(100))


def test_very_long_line_is_cut_and_takes_no_memory():
    cell = Cell()
    for _ in range(160):
        cell.feed("x" * 65_536)
    assert sum(map(len, cell.console._sources[0, "stdout"].screen._rows)) == screen.LINE_LIMIT
    cell.feed("\nnext\n")
    shown = cell.finish()
    assert shown.endswith(" ... [10,452,992 more characters in this line]\nnext\n")
    assert len(shown) < screen.LINE_LIMIT + 100
    assert len(cell.console.logs[0].text()) == 160 * 65_536 + 6


def test_long_line_that_arrives_whole_is_cut():
    cell = Cell()
    cell.feed("a\n" + "x" * 100_000 + "\nb\n")
    assert cell.finish() == f"a\n{'x' * screen.LINE_LIMIT} ... [67,232 more characters in this line]\nb\n"


@pytest.mark.parametrize("output", ["all", "none"])
def test_flood_costs_no_work_per_line(output, monkeypatch):
    """A million lines, counted in calls of our own functions: some per chunk, few per shown line."""
    calls = []
    for cls in (Screen, RankLog, backlog.Backlog, Console):
        for name, function in vars(cls).items():
            if callable(function) and not name.startswith("__"):

                def counted(*args, function=function, **kwargs):
                    calls.append(function)
                    return function(*args, **kwargs)

                monkeypatch.setattr(cls, name, counted)
    cell = Cell(4, output)
    chunk = "step 12 loss 0.1\n" * 4000  # about the 64 KiB that a pipe holds
    for number in range(250):
        cell.feed(chunk, rank=number % 4)
    cell.finish()
    assert len(calls) < 250 * 13
    assert sum(log.text().count("\n") for log in cell.console.logs) == 1_000_000


# What stays in a cell.


def kept(cell: Cell) -> list[str]:
    lines = cell.finish().splitlines()
    assert len(lines) <= 10_000
    assert sum(text_block.num_bytes(line + "\n") for line in lines) <= 1_000_000
    return lines


@pytest.mark.parametrize("width", [10, 300])
def test_cell_keeps_beginning_and_end_of_a_flood_and_counts_the_rest(width):
    cell = Cell(2, kept_in="run.logs(rank)")
    num_lines = 200_000
    for start in range(0, num_lines, 1000):
        cell.feed("".join(f"{n:{width}}\n" for n in range(start, start + 1000)), rank=start // 1000 % 2)
        if start % 20_000 == 0:
            cell.tick()
    lines = kept(cell)
    (gap,) = [place for place, line in enumerate(lines) if line.startswith("...")]
    left_out = int(lines[gap].split()[1].replace(",", ""))
    assert lines[gap] == f"... {left_out:,} lines of ranks 0, 1 left out here; run.logs(rank) has all ..."
    assert len(lines) - 1 + left_out == num_lines
    assert [int(line.removeprefix("[rank 0]")) for line in lines[:1000]] == list(range(1000))
    assert [int(line.removeprefix("[rank 1]")) for line in lines[-700:]] == list(range(num_lines - 700, num_lines))
    assert len(lines) > 9_000 or width == 300
    assert sum(map(len, lines)) > 700_000 or width == 10


def test_cell_that_has_room_for_everything_leaves_nothing_out():
    cell = Cell(4, kept_in="run.logs(rank)")
    for start in range(0, 9000, 100):
        for rank in range(4):  # The same lines of all ranks count once.
            cell.feed("".join(f"line {number}\n" for number in range(start, start + 100)), rank)
        if start < 4000:
            cell.tick()
    assert kept(cell)[:4000] == [f"[ranks 0-3] line {number}" for number in range(4000)]
    few = Cell(2, kept_in="run.logs(rank)")
    for start in range(0, 9000, 100):
        few.feed("".join(f"{number}\n" for number in range(start, start + 100)))
        few.tick()
    assert [line.removeprefix("[rank 0] ") for line in kept(few)] == list(map(str, range(9000)))


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


def test_warnings_and_notices_in_the_middle_of_a_flood_are_kept():
    cell = Cell(kept_in="run.logs(rank)")
    for number in range(100):
        cell.feed("out\n" * 1000)
        cell.feed(f"warning {number}\n", stream="stderr")
        cell.console.notice(f"notice {number}")
        cell.tick()
    lines = kept(cell)
    for number in range(100):
        assert f"warning {number}" in lines
        assert f"notice {number}" in lines


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
    (gap,) = [place for place, line in enumerate(lines) if line.startswith("...")]
    assert lines[0] == "f: 2 CPU ranks"
    assert lines[gap].startswith("... 14,502 lines of ranks 0, 1 left out here")
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


# The logs.


def test_log_keeps_both_streams_in_order_of_arrival():
    cell = Cell()
    cell.feed("a")
    cell.feed("E\n", stream="stderr")
    cell.feed("b\n")
    assert cell.console.logs[0].text() == "aE\nb\n"


@pytest.mark.parametrize("num_lines", [0, 1, 3, 5000, 10**6])
def test_tail_returns_the_last_lines_of_a_log(num_lines):
    log = RankLog()
    lines = [f"line {number}" for number in range(200_000)]
    log.write("\n".join(lines) + "\n")
    log.write("last\n")
    assert log.tail(num_lines) == tuple([*lines, "last"][-num_lines:] if num_lines else [])


def test_tail_shows_the_last_state_of_a_bar():
    log = RankLog()
    assert log.tail(3) == ()
    log.write("a\n\r10 %\r90 %\nunfinished")
    assert log.tail(3) == ("a", "90 %", "unfinished")


def test_log_leaves_memory_and_no_file_with_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = RankLog()
    for _ in range(50):
        log.write("é" * 50_000)
    assert len(log._memory) <= ranklog.SPOOL_LIMIT
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    assert log.text() == "é" * 2_500_000


def test_log_stays_in_memory_where_no_file_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    log = RankLog()
    for number in range(3):
        log.write(f"{number}" * 1_000_000 + "\n")
    assert len(log.text()) == 3_000_003
    assert log.tail(1) == ("2" * 1_000_000,)
