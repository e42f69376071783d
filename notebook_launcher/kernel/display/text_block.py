"""`TextBlock`: whole lines that one rank wrote at once."""

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
