"""Elements of SVG that pictures consist of."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from notebook_launcher.colours import INK, LineStyle
from notebook_launcher.drawing.widths import shorten
from notebook_launcher.wording.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["SIZE", "SMALL", "SvgPicture", "document", "marker", "pixels", "stack", "text"]

SIZE, SMALL = 12.0, 11.0
"""Font sizes in pixels: of titles, and of all other text."""
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',sans-serif"


@dataclasses.dataclass(frozen=True, slots=True)
class SvgPicture:
    """A part of a page: SVG elements that fill [0, width] x [0, height], in pixels."""

    width: float
    height: float
    body: str


def stack(pictures: Iterable[SvgPicture], *, gap: float = 18.0) -> SvgPicture:
    """Return one picture with the given ones below each other."""
    parts: list[str] = []
    top = width = 0.0
    for picture in pictures:
        top += gap if parts else 0.0
        parts.append(f'<g transform="translate(0 {pixels(top)})">{picture.body}</g>')
        top, width = top + picture.height, max(width, picture.width)
    return SvgPicture(width, top, "".join(parts))


def document(picture: SvgPicture, title: str) -> str:
    """Return a whole `<svg>`, which shrinks with the page and is also valid as a file."""
    width, height = pixels(picture.width), pixels(picture.height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}" color="{INK}" fill="none" font-family="{FONT}" '
        f'font-size="{pixels(SMALL)}" style="max-width:100%;height:auto">'
        f"<title>{escape(title)}</title>{picture.body}</svg>"
    )


def pixels(value: float) -> str:
    """Return a coordinate, rounded to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    bold: bool = False,
    size: float = SMALL,
    width: float | None = None,
    fill: str = "currentColor",
) -> str:
    """Return one line of text on the base line `y`; text wider than `width` is cut, with a tooltip for the whole."""
    shown = words if width is None else shorten(words, width, size * (1.06 if bold else 1.0))
    title = f"<title>{escape(words)}</title>" if shown != words else ""
    attributes = "" if anchor == "start" else f' text-anchor="{anchor}"'
    attributes += ' font-weight="600"' if bold else ""
    attributes += "" if size == SMALL else f' font-size="{pixels(size)}"'
    return f'<text x="{pixels(x)}" y="{pixels(y)}" fill="{fill}"{attributes}>{title}{escape(shown)}</text>'


def marker(style: LineStyle, at: Sequence[tuple[float, float]], radius: float = 3.2) -> str:
    """Return a line's marker at each of the places, as one path."""
    path = "".join(_SHAPES[style.marker](x, y, radius) for x, y in at)
    stroke = f' stroke="{style.colour}" stroke-width="2"' if style.marker in ("cross", "bar") else ""
    return f'<path d="{path}" fill="{style.colour}"{stroke}/>' if at else ""


def _circle(x: float, y: float, r: float) -> str:
    d = pixels(2 * r)
    return f"M{pixels(x - r)} {pixels(y)}a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 -{d} 0z"


def _square(x: float, y: float, r: float) -> str:
    s = pixels(1.8 * r)
    return f"M{pixels(x - 0.9 * r)} {pixels(y - 0.9 * r)}h{s}v{s}h-{s}z"


def _triangle(x: float, y: float, r: float) -> str:
    return f"M{pixels(x)} {pixels(y - 1.25 * r)}l{pixels(1.2 * r)} {pixels(2.1 * r)}h-{pixels(2.4 * r)}z"


def _diamond(x: float, y: float, r: float) -> str:
    s = pixels(1.35 * r)
    return f"M{pixels(x)} {pixels(y - 1.35 * r)}l{s} {s}l-{s} {s}l-{s} -{s}z"


def _cross(x: float, y: float, r: float) -> str:
    s, d = 0.9 * r, pixels(1.8 * r)
    return f"M{pixels(x - s)} {pixels(y - s)}l{d} {d}m0 -{d}l-{d} {d}"


def _bar(x: float, y: float, r: float) -> str:
    return f"M{pixels(x)} {pixels(y - 1.3 * r)}v{pixels(2.6 * r)}"


_SHAPES = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "cross": _cross,
    "bar": _bar,
}
