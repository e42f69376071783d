"""The outputs that a run leaves in the notebook; they need neither a kernel nor a widget to be seen."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.drawing.plots import PlotOptions
    from notebook_launcher.history.curves import Curves
    from notebook_launcher.history.schema import RunPicture, RunSnapshot

__all__ = ["NOTHING", "Bundle", "final_outputs", "has_picture", "kept_picture", "line_of", "picture_of"]

Bundle = dict[str, str]
"""One output: its representations by MIME type."""
NOTHING: Bundle = {"text/html": "", "text/plain": ""}
"""An output that takes no room."""
MISSING = (
    'body:not(:has([data-nbl-live="{key}"])) .jp-OutputArea-child:not(:has([class^="nbp-kept-"])):has('
    '+ .jp-OutputArea-child [data-nbl-kept="{key}"]) {{ display: none }}'
)
"""Style sheet that hides the place of a monitor that the page does not have; the monitor of a panel has no place of its
own, and the output above is the picture of the panel."""
SHORT = 10.0
"""Seconds up to which a run without curves leaves one line."""


def has_picture(snapshot: RunSnapshot, curves: Curves) -> bool:
    """Return True if the run has curves or phases to draw, or is long enough for a drawing of its memory and load."""
    return bool(len(curves) or snapshot.phases or (snapshot.seconds >= SHORT and snapshot.usage))


def picture_of(
    snapshot: RunSnapshot,
    curves: Curves,
    key: str = "",
    pictures: Sequence[RunPicture] = (),
    options: PlotOptions | None = None,
) -> tuple[Bundle, Bundle]:
    """Return two outputs, the tables and the drawing, whose curves are drawn with these options.

    With the key of a monitor, its page shows the monitor in place of both for as long as the kernel lives. The saved
    notebook holds the picture alone and no widget, which would be missing without its kernel.

    JupyterLab shows an SVG output of a notebook that it does not trust as text, and an image inside HTML as it is.
    Front ends without HTML take the SVG itself.
    """
    from notebook_launcher.drawing.run_picture import picture_html, static_html, static_svg

    tables = _marked(static_html(snapshot, curves, pictures=pictures), "explore", key)
    table = {"text/html": tables, "text/plain": _words(snapshot)}
    if not has_picture(snapshot, curves):
        return table, NOTHING
    drawing, words = static_svg(snapshot, curves, options), f"{snapshot.name}: curves and timeline"
    picture = _marked(picture_html(drawing, words), "cover", key)
    return table, {"text/html": picture, "image/svg+xml": drawing, "text/plain": words}


def final_outputs(
    line: str,
    snapshot: RunSnapshot,
    curves: Curves,
    *,
    is_raised: bool,
    key: str,
    pictures: Sequence[RunPicture] = (),
    options: PlotOptions | None = None,
) -> list[Bundle]:
    """Return the outputs that a run leaves at the end of its cell.

    Args:
        line: End of the run, in words.
        snapshot: State of the run.
        curves: Its metrics.
        is_raised: True if the cell raises the run's exception, which describes a failure in full.
        key: The key of the monitor that may be explored in place of the picture; empty: there is none.
        pictures: Pictures that ranks reported.
        options: Options of the curves; None: the usual ones.
    """
    if snapshot.state == "failed" and is_raised:
        return [_folded(line, dataclasses.replace(snapshot, failures=(), error=""), curves, key)]
    if snapshot.state != "failed" and snapshot.seconds < SHORT and not (has_picture(snapshot, curves) or pictures):
        return [_folded(line, snapshot, curves, key)]
    return [bundle for bundle in picture_of(snapshot, curves, key, pictures, options) if bundle is not NOTHING]


def _words(snapshot: RunSnapshot) -> str:
    from notebook_launcher.drawing.run_picture import static_text
    from notebook_launcher.wording.text import bounded

    return bounded(static_text(snapshot), f"open_run({snapshot.id!r}).report() has more")


def _folded(line: str, snapshot: RunSnapshot, curves: Curves, key: str) -> Bundle:
    return {**_folded_picture(snapshot, curves, line, key), "text/plain": line}


def _marked(html: str, name: str, key: str) -> str:
    return f'<div data-nbl-{name}="{key}">{html}</div>' if key else html


def kept_picture(snapshot: RunSnapshot, curves: Curves, key: str, *, opened: bool = False) -> Bundle:
    """Return the folded picture of a run, which the page hides while it has the monitor of this key.

    Its style sheet hides the output above it, the monitor, where that is missing. JupyterLab shows "model not found"
    there if the notebook was saved after a reload of the page, which no longer receives the outputs of a busy cell, or
    while it showed the monitor of a run that was over.
    """
    bundle = _folded_picture(snapshot, curves, opened=opened)
    html = f"<style>{MISSING.format(key=key)}</style>{bundle['text/html']}" if key else bundle["text/html"]
    return {**bundle, "text/html": _marked(html, "kept", key)}


def line_of(snapshot: RunSnapshot) -> Bundle:
    """Return the first line of a run's picture, for front ends that cannot draw the monitor above the picture."""
    from notebook_launcher.drawing.run_picture import headline
    from notebook_launcher.wording.text import escape

    return {"text/html": f"<div>{escape(headline(snapshot))}</div>", "text/plain": _words(snapshot)}


def _folded_picture(
    snapshot: RunSnapshot, curves: Curves, line: str = "", key: str = "", *, opened: bool = False
) -> Bundle:
    """Return the whole picture as one output that shows one line until it is clicked."""
    from notebook_launcher.drawing.run_picture import headline, static_html
    from notebook_launcher.drawing.tables import folded
    from notebook_launcher.wording.units import format_elapsed

    if not (line or snapshot.is_over):  # A notebook that is saved now says this for ever.
        line = f"{headline(snapshot)}: a picture after {format_elapsed(snapshot.seconds)}, when the end was not known"
    page = _marked(static_html(snapshot, curves, picture=has_picture(snapshot, curves)), "explore", key)
    return {"text/html": folded(line or headline(snapshot), page, opened=opened), "text/plain": _words(snapshot)}
