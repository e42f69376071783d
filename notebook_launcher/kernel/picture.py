"""What a run leaves in the notebook: outputs that need neither a kernel nor a widget to be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_launcher.history.curves import Curves
    from notebook_launcher.history.records import RunSnapshot

__all__ = ["Bundle", "folded_picture", "has_picture", "picture_of"]

Bundle = dict[str, str]
"""One output: its representations by MIME type."""


def has_picture(snapshot: RunSnapshot, curves: Curves) -> bool:
    """Return whether there is more to show than that the run took place."""
    return bool(len(curves) or snapshot.phases)


def picture_of(snapshot: RunSnapshot, curves: Curves) -> tuple[Bundle, Bundle]:
    """Return two outputs, the tables and the drawing.

    JupyterLab shows an SVG output of a notebook that it does not trust as text, and an image inside HTML as it is.
    Whoever has no HTML takes the SVG itself.
    """
    from notebook_launcher.drawing.page import picture_html, static_html, static_svg, static_text

    table = {"text/html": static_html(snapshot, curves), "text/plain": static_text(snapshot)}
    if not has_picture(snapshot, curves):
        return table, {"text/html": "", "text/plain": ""}  # Takes no room.
    drawing, words = static_svg(snapshot, curves), f"{snapshot.name}: curves and timeline"
    return table, {"text/html": picture_html(drawing, words), "image/svg+xml": drawing, "text/plain": words}


def folded_picture(snapshot: RunSnapshot, curves: Curves) -> Bundle:
    """Return all of it as one output, of which one line is seen until somebody clicks on it."""
    from notebook_launcher.drawing.page import headline, static_html, static_text
    from notebook_launcher.drawing.tables import folded

    page = static_html(snapshot, curves, picture=has_picture(snapshot, curves))
    return {"text/html": folded(headline(snapshot), page), "text/plain": static_text(snapshot)}
