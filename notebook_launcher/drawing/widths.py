"""Estimated widths of texts, because a picture is drawn without knowing the fonts of the page that shows it."""

from __future__ import annotations

import unicodedata

__all__ = ["shorten", "text_width"]

_NARROW = frozenset("iIjl.,:;'|![]()/ ftr·")
_WIDE = frozenset("mwMW%@")


def shorten(text: str, width: float, size: float) -> str:
    """Return the text, cut with an ellipsis if it is wider than `width` pixels at this font size."""
    if text_width(text, size) <= width:
        return text
    room = width - size
    for at, character in enumerate(text):
        room -= text_width(character, size)
        if room < 0:
            return text[:at].rstrip() + "…"
    return text


def text_width(text: str, size: float) -> float:
    """Return the approximate width of a text in pixels, in DejaVu Sans, the widest font that a page may choose."""
    return size * sum(_ems(character) for character in text)


def _ems(character: str) -> float:
    if character in _NARROW:
        return 0.4
    if character in _WIDE:
        return 0.98
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF":
        return 1.1
    return 0.7 if character.isupper() else 0.64
