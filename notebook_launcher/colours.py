"""Colours for lines and phases, for eyes that see fewer of them too: on a known background, or on white and on black.

A colour for both backgrounds has a contrast of at least 3:1 (WCAG 1.4.11) with white and with #111111, JupyterLab's
dark page; under deuteranopia, protanopia and tritanopia (Machado et al. 2009) any two of the series differ by more than
20 in CIE76. tests/drawing/test_drawing_parts.py computes both. Shapes, letters and patterns repeat the distinction.
"""

from __future__ import annotations

import dataclasses

INK = "#797979"
"""Text and axes of a picture that cannot know its background: 4.3:1 on white and on #111111. JupyterLab shows
SVG as an image, which inherits no colour from the page."""
SERIES = ("#2b74ee", "#dd780a", "#0aa573", "#d469d0", "#d70a36", "#6e6279")
GOOD, BAD = "#0a8f63", "#d70a36"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Colours of the live monitor on a background that it knows; its lines have those of the saved picture."""

    phase_ink: str
    """Letters on a phase."""
    live: str
    good: str
    bad: str
    warn: str
    mark: str
    """Background of what a search has found."""


LIGHT = Palette(
    phase_ink="#ffffff",
    live="#0067a5",
    good="#0b7a4b",
    bad="#b3261e",
    warn="#8f5b00",
    mark="#ffe494",
)
DARK = Palette(
    phase_ink="#ffffff",
    live="#5fb3ea",
    good="#4cc38a",
    bad="#ff8a80",
    warn="#e5b454",
    mark="#6a5414",
)

_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "bar")


@dataclasses.dataclass(frozen=True, slots=True)
class LineStyle:
    """Style of one line; no two of the first 30 styles are equal."""

    colour: str
    marker: str
    dash: str


def line_style(index: int) -> LineStyle:
    """Return the style of line `index`: six colours with a marker each, then the same colours dashed."""
    turn, place = divmod(index, len(SERIES))
    return LineStyle(SERIES[place], MARKERS[place], _DASHES[turn % len(_DASHES)])
