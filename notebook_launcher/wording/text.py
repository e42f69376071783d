"""Text from anywhere, made safe for a page and short enough for its place."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_ERROR",
    "MAX_SHOWN",
    "bounded",
    "clean",
    "escape",
    "first_columns",
    "first_few",
    "name_rank",
    "no_such_rank",
    "one_line",
    "shape_of",
    "type_of",
    "without_colours",
]

MAX_TEXT = 50_000
"""Characters of one text that a page takes in; a traceback has about 2,000."""
MAX_SHOWN, MAX_ERROR = 2000, 3000
"""Characters of the text by which a value, and an error, shows itself: programs that read notebooks cut longer texts
somewhere, and their readers pay by length."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# What XML 1.0 cannot hold, the C1 controls, and the marks that turn the direction of the text around them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]",
)


def name_rank(rank: int, node: str = "", *, of: int | None = None) -> str:
    """Return `rank 3`, `rank 3 of 8` or `rank 3 of 8 (gpu2)`: with the number of ranks and its machine, if given."""
    total = "" if of is None else f" of {of}"
    return f"rank {rank}{total} ({node})" if node else f"rank {rank}{total}"


def no_such_rank(rank: object, num: int, whose: str = "run") -> str:
    """Return `there is no rank 7: this run has 2 ranks, 0 to 1`."""
    present = f"{num} ranks, 0 to {num - 1}" if num > 1 else "rank 0 alone"
    return f"there is no rank {rank!r}: this {whose} has {present}"


def first_few(names: Sequence[str], at_most: int = 3) -> str:
    """Return `a, b, c, ...`: the first names, and dots if there are more."""
    return ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")


def type_of(value: object) -> str:
    """Return the type of a value with its article: `an int`, `a list`."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Return the shape of a tensor, an array or a table; None for other values, and for one that has no shape yet."""
    try:
        shape = value.shape
    except Exception:  # torch's uninitialised parameters and nested tensors raise a RuntimeError
        return None
    return tuple(shape) if isinstance(shape, tuple) else None


def clean(text: object, limit: int = MAX_TEXT) -> str:
    """Return the text without colour codes; other control characters and lone surrogates become `\ufffd`."""
    raw = str(text)
    kept = _UNPRINTABLE.sub("\ufffd", _ANSI.sub("", raw[:limit].replace("\r\n", "\n")))
    return kept if len(raw) <= limit else f"{kept}\n... {len(raw) - limit:,} more characters"


def without_colours(text: str) -> str:
    """Return the text without the escape sequences of a terminal."""
    return _ANSI.sub("", text)


def bounded(text: str, whole: str, limit: int = MAX_SHOWN) -> str:
    """Return a text in at most `limit` characters: its beginning and end, and between them a line about the rest.

    Args:
        text: The text.
        whole: A clause that says where all of it is, such as `print(run.stacks()) shows all`.
        limit: Characters at most.
    """
    if len(text) <= limit:
        return text
    room = limit - len(whole) - 50  # for the line between
    start, end = text[: room * 2 // 3], text[-(room // 3) :]
    # At whole lines, unless a line is so long that too little would be left.
    if (cut := start.rfind("\n")) > room // 3:
        start = start[:cut]
    if 0 <= (cut := end.find("\n")) < room // 6:
        end = end[cut + 1 :]
    return f"{start}\n... {len(text) - len(start) - len(end):,} characters left out here: {whole} ...\n{end}"


def one_line(text: object, limit: int = 200) -> str:
    """Return the text in one line of at most `limit` characters."""
    line = " ".join(clean(text, 4 * limit).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def first_columns(text: str, width: int) -> str:
    """Return the beginning of a text that takes at most `width` columns of a terminal; some characters take two."""
    for at, character in enumerate(text):
        width -= 0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if width < 0:
            return text[:at]
    return text


def escape(text: object) -> str:
    """Return the text for HTML and SVG, inside elements and inside quoted attributes."""
    import html  # here, because a notebook's first cell imports this module, and this takes a millisecond

    return html.escape(clean(text))
