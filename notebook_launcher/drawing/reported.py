"""Pictures that ranks reported, as HTML that a saved notebook keeps."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from notebook_launcher.text import escape, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.history.schema import RunPicture

__all__ = ["reported_html"]

MAX_PICTURES = 8
MAX_BYTES = 400_000
"""Bytes of all pictures together, because a notebook's file holds them."""
LOOK = "display:inline-block;margin:8px 12px 0 0;vertical-align:top"


def reported_html(pictures: Sequence[RunPicture]) -> str:
    """Return the newest picture of each name, in the order in which the names appeared; empty if there is none."""
    newest = {picture.name: picture for picture in pictures}
    parts, room = [], MAX_BYTES
    for picture in list(newest.values())[:MAX_PICTURES]:
        room -= len(picture.data)
        if room >= 0:
            parts.append(_figure(picture))
    return f"<div>{''.join(parts)}</div>" if parts else ""


def _figure(picture: RunPicture) -> str:
    words = escape(f"{one_line(picture.name, 60)}, rank {picture.rank}, step {picture.step}")
    source = f"data:{picture.mime};base64,{base64.b64encode(picture.data).decode()}"
    style = "display:block;max-width:320px;max-height:320px;min-width:96px;image-rendering:pixelated"
    return f'<div style="{LOOK}"><div>{words}</div><img src="{source}" alt="{words}" style="{style}"></div>'
