"""Colours for lines and phases that hold on white and on black, and for eyes that see fewer of them.

Each has a contrast of at least 3:1 (WCAG 1.4.11) with white and with #111111, JupyterLab's dark page; under
deuteranopia, protanopia and tritanopia (Machado et al. 2009) any two of the series differ by more than 20 in CIE76.
tests/drawing/test_drawing_parts.py computes both. Shapes, letters and patterns say the same again.
"""

from __future__ import annotations

import dataclasses

__all__ = ["BAD", "GOOD", "INK", "MARKERS", "SERIES", "LineStyle", "line_style"]

INK = "#797979"
"""Text and axes of a picture that cannot know its background: 4.3:1 on white and on #111111. JupyterLab shows
SVG as an image, which inherits no colour from the page."""
SERIES = ("#2b74ee", "#dd780a", "#0aa573", "#d469d0", "#d70a36", "#6e6279")
GOOD, BAD = "#0a8f63", "#d70a36"

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
