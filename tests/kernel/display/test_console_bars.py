"""Progress bars and unfinished lines in the console's live area."""

from __future__ import annotations

import pytest

from notebook_launcher.kernel.display import console
from notebook_launcher.kernel.display.console import Status, Text
from tests.support.console_cell import Cell


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


def test_finish_is_due_at_once_and_the_console_remains_usable():
    cell = Cell()
    cell.feed("a\n")
    cell.tick()
    cell.feed("b")
    cell.console.finish()
    assert cell.console.take(cell.now) == [Text("stdout", "b\n")]
    cell.feed("c\n")
    assert cell.finish().endswith("c\n")
