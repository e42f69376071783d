"""`TextBlock`: whole lines that one rank wrote at once, its size, and the ways to cut it between two lines."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.engines.events import Stream

__all__ = ["TextBlock", "num_bytes"]


def num_bytes(text: str) -> int:
    """Return the size of a text in a Jupyter message: a newline takes two bytes, and an escape six."""
    return len(json.dumps(text, ensure_ascii=False).encode())


@dataclasses.dataclass(frozen=True, slots=True)
class TextBlock:
    """Whole lines that one rank wrote at once."""

    rank: int | None
    """The rank; None for the launcher's own lines."""
    stream: Stream
    text: str
    """The lines; each ends with a newline."""

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return self.text.count("\n")

    def message_size(self, label_size: int) -> int:
        """Return the bytes that the block takes in a message, where each line has a label of this size."""
        return num_bytes(self.text) + label_size * self.num_lines

    def cut(self, place: int) -> tuple[TextBlock, TextBlock]:
        """Return the lines before a place in the text, and the lines after it."""
        return (
            TextBlock(self.rank, self.stream, self.text[:place]),
            TextBlock(self.rank, self.stream, self.text[place:]),
        )

    def cut_after_size(self, size: int) -> tuple[TextBlock, TextBlock]:
        """Return the first lines, of at most `size` characters, and the rest."""
        return self.cut(self.text.rfind("\n", 0, size) + 1)

    def cut_before_size(self, size: int) -> tuple[TextBlock, TextBlock]:
        """Return the rest, and the last lines, of at most `size` characters."""
        if size >= len(self.text):
            return self.cut(0)
        return self.cut(self.text.find("\n", len(self.text) - size - 1) + 1)

    def cut_after_lines(self, num_lines: int) -> tuple[TextBlock, TextBlock]:
        """Return the first lines, at most so many, and the rest."""
        if self.num_lines <= num_lines:
            return self.cut(len(self.text))
        rest = self.text.split("\n", max(num_lines, 0))[-1]
        return self.cut(len(self.text) - len(rest))

    def cut_before_lines(self, num_lines: int) -> tuple[TextBlock, TextBlock]:
        """Return the rest, and the last lines, at most so many."""
        if self.num_lines <= num_lines:
            return self.cut(0)
        rest = self.text[:-1].rsplit("\n", max(num_lines, 0))[0]
        return self.cut(len(rest) + 1)
