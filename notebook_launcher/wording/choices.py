"""Words that a user chose among others: unknown ones with the nearest, and words for true and false."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["did_you_mean", "read_bool", "unknown"]

_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


def read_bool(text: str) -> bool | None:
    """Return the truth value that a word stands for (1, true, t, yes, y, on, or an opposite), None for other words."""
    word = text.strip().lower()
    return True if word in _TRUE else False if word in _FALSE else None


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """Return `Did you mean show?` for the known words that are close to the typed one; empty if none is.

    Words that contain the typed one come first.
    """
    words = list(known)
    close = [word for word in words if typed and typed in word]
    close = (close or difflib.get_close_matches(typed, words))[:3]
    return f"Did you mean {' or '.join(close)}?" if close else ""


def unknown(name: str, value: object, choices: Iterable[str], *, more: str = "") -> str:
    """Return the message for a value that is none of its choices, with the nearest choice and all of them.

    Args:
        name: The option's name.
        value: The value as given.
        choices: The values that it can have; their case is ignored.
        more: Words that follow the last choice, such as ` or None`.
    """
    folded = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(str(value).lower(), folded, n=1)
    hint = f" Did you mean {folded[close[0]]!r}?" if close else ""
    return f"{name}={value!r} is unknown.{hint} It can be {', '.join(map(repr, folded.values()))}{more}."
