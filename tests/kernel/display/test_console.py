"""From the bytes of the ranks' pipes to the messages of the cell."""

from __future__ import annotations

import random

import pytest

from notebook_launcher.kernel.display import console
from notebook_launcher.kernel.display.console import Console, Text, label
from notebook_launcher.wording import rank_list
from tests.support.console_cell import Cell


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
