"""A console with a clock that the test moves, and the text that a cell would show."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.kernel.display.console import Console, Text

if TYPE_CHECKING:
    from notebook_launcher.kernel.display import console


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
