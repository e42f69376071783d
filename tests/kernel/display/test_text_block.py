"""Text blocks are cut between two lines, into pieces that are as large as they may be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_launcher.kernel.display.kept_lines import TextBlock, num_bytes

lines = st.lists(st.text(alphabet="a\té\U0001f600", max_size=5), min_size=1, max_size=6)


def block_of(*texts: str) -> TextBlock:
    return TextBlock(1, "stderr", "".join(f"{text}\n" for text in texts))


@pytest.mark.parametrize(
    ("text", "size"), [("", 2), ("a", 3), ("\n", 4), ('"', 4), ("\\", 4), ("\x1b", 8), ("é", 4), ("\U0001f600", 6)]
)
def test_size_in_a_message_counts_quotes_escapes_and_utf8(text: str, size: int) -> None:
    assert num_bytes(text) == size


@given(texts=lines, limit=st.integers(0, 9))
@settings(deadline=None, max_examples=200)
def test_cut_gives_the_first_lines_and_the_rest(texts: list[str], limit: int) -> None:
    assert block_of(*texts).cut(limit) == (block_of(*texts[:limit]), block_of(*texts[limit:]))
