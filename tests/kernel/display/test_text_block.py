"""Text blocks are cut between two lines, into pieces that are as large as they may be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_launcher.kernel.display.kept_lines import TextBlock, num_bytes

lines = st.lists(st.text(alphabet="a\té\U0001f600", max_size=5), min_size=1, max_size=6)
limits = st.integers(0, 40)


def block_of(*texts: str) -> TextBlock:
    return TextBlock(1, "stderr", "".join(f"{text}\n" for text in texts))


@pytest.mark.parametrize(
    ("text", "size"), [("", 2), ("a", 3), ("\n", 4), ('"', 4), ("\\", 4), ("\x1b", 8), ("é", 4), ("\U0001f600", 6)]
)
def test_size_in_a_message_counts_quotes_escapes_and_utf8(text: str, size: int) -> None:
    assert num_bytes(text) == size


def fits_size(block: TextBlock, limit: int) -> bool:
    return len(block.text) <= limit


def fits_lines(block: TextBlock, limit: int) -> bool:
    return block.num_lines <= limit


@given(texts=lines, limit=limits)
@settings(deadline=None, max_examples=200)
def test_first_lines_are_as_many_as_fit(texts: list[str], limit: int) -> None:
    block = block_of(*texts)
    first, rest = block.cut_after_lines(limit)
    assert (first, rest) == (block_of(*texts[: first.num_lines]), block_of(*texts[first.num_lines :]))
    assert fits_lines(first, limit)
    assert not rest.text or not fits_lines(block_of(*texts[: first.num_lines + 1]), limit)


@given(texts=lines, limit=limits)
@settings(deadline=None, max_examples=200)
def test_last_lines_are_as_many_as_fit(texts: list[str], limit: int) -> None:
    block = block_of(*texts)
    for (rest, last), fits in ((block.cut_before_size(limit), fits_size), (block.cut_before_lines(limit), fits_lines)):
        assert (rest, last) == (block_of(*texts[: rest.num_lines]), block_of(*texts[rest.num_lines :]))
        assert fits(last, limit)
        assert not rest.text or not fits(block_of(*texts[rest.num_lines - 1 :]), limit)
