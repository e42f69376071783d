"""From the bytes of the ranks' pipes to the messages of the cell: lines, progress bars and the live area."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_launcher.kernel.display import console
from notebook_launcher.kernel.display.console import Console, Status, Text
from notebook_launcher.kernel.display.kept_lines import TextBlock, num_bytes
from tests.support.console_cell import Cell


def out(text: str | bytes, rank: int = 0) -> tuple[str | bytes, int, str]:
    return text, rank, "stdout"


def err(text: str, rank: int = 0) -> tuple[str, int, str]:
    return text, rank, "stderr"


NOTICE = "2 CPU ranks, gloo; no GPU found"
# By behaviour: the number of ranks, and steps: output, the messages of the next tick as a list, a notice of the
# launcher's own in a set, and at the end all text that was shown.
PLAYS: dict[str, tuple[int, list[Any]]] = {
    "a line in pieces stays whole": (
        1,
        [out("one"), out(" li"), out("ne\nan"), [Text("stdout", "one line\n")], "one line\nan\n"],
    ),
    "bytes that are not UTF-8 are replaced": (
        1,
        [out(b"\xff\xfeok\n"), out(b"cut \xe2\x82"), "\ufffd\ufffdok\ncut \ufffd\n"],
    ),
    "the only rank has no label": (1, [out("a\nb\n"), "a\nb\n"]),
    "each line has the label of its rank": (2, [out("a\nb\n", 1), "[rank 1] a\n[rank 1] b\n"]),
    "the same line of several ranks is shown once": (
        4,
        [
            *(out(f"hello\nI am {rank}\nbye\n", rank) for rank in (2, 0, 1, 3)),
            "[ranks 0-3] hello\n[rank 2] I am 2\n[rank 0] I am 0\n[rank 1] I am 1\n[rank 3] I am 3\n[ranks 0-3] bye\n",
        ],
    ),
    "the same text on another stream is another line": (
        2,
        [out("x\n"), err("x\n", 1), [Text("stdout", "[rank 0] x\n"), Text("stderr", "[rank 1] x\n")]],
    ),
    "lines that differ keep the order of arrival": (
        2,
        [out("a\n"), out("b\n", 1), out("c\n"), out("d\n", 1), "[rank 0] a\n[rank 1] b\n[rank 0] c\n[rank 1] d\n"],
    ),
    "streams of one rank keep their order": (
        1,
        [
            *(out("1\n"), err("2\n"), out("3\n"), out("4\n")),
            [Text("stdout", "1\n"), Text("stderr", "2\n"), Text("stdout", "3\n4\n")],
        ],
    ),
    "notices have no label and keep their place": (
        2,
        [out("a\n", 1), {NOTICE}, out("b\n", 1), f"[rank 1] a\n{NOTICE}\n[rank 1] b\n"],
    ),
    "line ends of Windows and colours pass through": (
        1,
        [out("\x1b[31mred\x1b[0m\r\nnext\r\n"), [Text("stdout", "\x1b[31mred\x1b[0m\nnext\n")]],
    ),
    "hiding the cursor leaves no line": (1, [out("\x1b[?25lworking\n\x1b[?25h"), "working\n"]),
    "an unfinished line becomes live only when it stays": (
        1,
        [
            *(out("a\nloading ..."), [Text("stdout", "a\n")], [Status("loading ...")]),
            *(out(" done\n"), [Text("stdout", "loading ... done\n"), Status("")]),
        ],
    ),
    "a bar is one live line, and its last state a normal line": (
        1,
        [
            *(err("\r0 %"), err("\r10 %"), [Status("10 %")], err("\r50 %"), [Status("50 %")]),
            *(err("\r100 %\n"), "100 %\n"),
        ],
    ),
    "nested bars share the live row of their rank": (
        2,
        [
            *(part for r in (0, 1) for part in (err("\repoch 1/3", r), err(f"\n\rbatch {r}/9\x1b[A", r))),
            [Status("[rank 0] epoch 1/3  ·  batch 0/9\n[rank 1] epoch 1/3  ·  batch 1/9")],
        ],
    ),
    "nested bars of tqdm end as one line each": (
        1,
        [
            *(err("\router 0/2"), err("\n"), err("\rinner 0/9"), err("\x1b[A"), [Status("outer 0/2  ·  inner 0/9")]),
            *(err("\n"), err("\rinner 5/9"), err("\x1b[A"), [Status("outer 0/2  ·  inner 5/9")]),
            *(err("\n"), err("\r         "), err("\r\x1b[A"), err("\router 2/2"), err("\n"), "outer 2/2\n"),
        ],
    ),
    "a bar that puts its return last is live, too": (
        1,
        [out("10 %\r20 %\r"), [Status("20 %")], out("done\n"), "done\n"],
    ),
    "a bar that erases itself leaves nothing": (
        1,
        [out("\r100 %"), [Status("100 %")], out("\r      \r"), [Status("")], ""],
    ),
    "bars of all ranks share the live area": (
        3,
        [err("\r10 %"), err("\r10 %", 1), err("\r20 %", 2), [Status("[ranks 0,1] 10 %\n[rank 2] 20 %")]],
    ),
    "a bar ends on standard output, and a warning after it on standard error": (
        1,
        [err("\r100 %\ncareful\n"), [Text("stdout", "100 %\n"), Text("stderr", "careful\n")]],
    ),
    "ranks in a row are a span": (5, [*(out("x\n", rank) for rank in (4, 0, 1, 2)), "[ranks 0-2,4] x\n"]),
    "printing beside a bar leaves the bar live": (
        1,
        [err("\r10 %"), out("loss 0.1\n"), [Text("stdout", "loss 0.1\n"), Status("10 %")]],
    ),
}


@pytest.mark.parametrize("behaviour", PLAYS)
def test_console_shows(behaviour: str) -> None:
    num_ranks, steps = PLAYS[behaviour]
    cell = Cell(num_ranks)
    for step in steps:
        if isinstance(step, tuple):
            cell.feed(*step)
        elif isinstance(step, list):
            assert cell.tick() == step
        elif isinstance(step, set):
            cell.console.notice(*step)
        else:
            assert cell.finish() == step


def test_first_line_is_published_at_once_and_the_next_a_tick_later_unless_forced():
    cell = Cell()
    assert (Console(2).next_due(1.0), Console(2).take(1.0)) == (None, [])
    cell.feed("a\n")
    assert cell.console.next_due(0.0) == 0
    assert cell.console.take(0.0) == [Text("stdout", "a\n")]
    cell.feed("b\n")
    assert cell.console.next_due(0.1) == pytest.approx(0.15)
    assert cell.console.take(0.1) == []
    assert cell.console.take(0.25) == [Text("stdout", "b\n")]
    assert cell.console.next_due(0.25) is None
    cell.feed("c\n")
    assert cell.console.take(0.3, force=True) == [Text("stdout", "c\n")]


def test_first_line_waits_a_moment_for_the_other_ranks():
    cell = Cell(2)
    cell.feed("hello\n", 0)
    due = cell.console.next_due(0.0)
    assert due is not None
    assert 0 < due <= console.GATHER
    cell.feed("hello\n", 1)
    assert cell.console.next_due(0.0) == 0
    assert cell.tick() == [Text("stdout", "[ranks 0,1] hello\n")]


def test_finish_is_due_at_once_and_the_console_remains_usable():
    cell = Cell()
    cell.feed("a\n")
    cell.tick()
    cell.feed("b")
    cell.console.finish()
    assert cell.console.take(cell.now) == [Text("stdout", "b\n")]
    cell.feed("c\n")
    assert cell.finish().endswith("c\n")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_may_be_split_over_chunks(size):
    cell = Cell()
    data = "héllo € 😀\n".encode()
    for start in range(0, len(data), size):
        cell.feed(data[start : start + size])
        cell.feed("", stream="stderr")
    assert cell.finish() == "héllo € 😀\n"
    assert cell.console.logs[0].text() == "héllo € 😀\n"


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


def test_many_changes_of_stream_do_not_make_many_messages():
    cell = Cell()
    for number in range(100):
        cell.feed(f"{number}\n", stream=("stdout", "stderr")[number % 2])
    messages = cell.tick()
    assert len(messages) == console.MAX_TEXTS
    assert "".join(message.text for message in messages) == "".join(f"{number}\n" for number in range(100))


@pytest.mark.parametrize(("output", "shown"), [("all", "[ranks 0,1] x\n"), ("rank0", "[rank 0] x\n"), ("none", "")])
def test_output_option_selects_ranks_and_logs_have_all_lines(output, shown):
    cell = Cell(2, output)
    cell.feed("x\n", 0)
    cell.feed("x\n", 1)
    cell.console.notice("stopped")
    assert cell.finish() == f"{shown}stopped\n"
    assert [log.text() for log in cell.console.logs] == ["x\n", "x\n"]


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


def test_live_area_is_bounded():
    cell = Cell(100)
    for rank in range(100):
        cell.feed(f"\r{rank} " + "x" * 1000, rank)
    (status,) = cell.tick()
    lines = status.text.split("\n")
    assert len(lines) == console.STATUS_ROWS
    assert lines[-1] == f"... and {100 - console.STATUS_ROWS + 1} more"
    assert max(map(len, lines)) < 300


@pytest.mark.parametrize(
    ("text", "size"), [("", 2), ("a", 3), ("\n", 4), ('"', 4), ("\\", 4), ("\x1b", 8), ("é", 4), ("\U0001f600", 6)]
)
def test_size_in_a_message_counts_quotes_escapes_and_utf8(text: str, size: int) -> None:
    assert num_bytes(text) == size


@given(texts=st.lists(st.text(alphabet="a\té\U0001f600", max_size=5), min_size=1, max_size=6), limit=st.integers(0, 9))
@settings(deadline=None, max_examples=200)
def test_block_is_cut_into_its_first_lines_and_the_rest(texts: list[str], limit: int) -> None:
    def block_of(lines: list[str]) -> TextBlock:
        return TextBlock(1, "stderr", "".join(f"{line}\n" for line in lines))

    assert block_of(texts).cut(limit) == (block_of(texts[:limit]), block_of(texts[limit:]))
