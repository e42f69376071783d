"""Pictures and tables that ranks reported, as HTML that a saved notebook keeps."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
from typing import TYPE_CHECKING

from notebook_launcher.drawing.tables import MAX_ROWS, Column, table_html
from notebook_launcher.wording.text import escape, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.history.schema import RunPicture

__all__ = ["TABLE", "read_rows", "reported_html", "without_formulas"]

TABLE = "text/csv"
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that a spreadsheet carries out."""
MAX_PICTURES = 8
MAX_COLUMNS = 24
MAX_BYTES = 400_000
"""Bytes of all pictures together, because a notebook's file holds them."""
LOOK = "display:inline-block;margin:8px 12px 0 0;vertical-align:top"


def reported_html(pictures: Sequence[RunPicture]) -> str:
    """Return the newest picture or table of each name, in the order in which the names appeared, tables last."""
    newest = {picture.name: picture for picture in pictures}
    tables = [_table(table) for table in newest.values() if table.mime == TABLE]
    parts, room = [], MAX_BYTES
    for picture in [reported for reported in newest.values() if reported.mime != TABLE][:MAX_PICTURES]:
        room -= len(picture.data)
        if room >= 0:
            parts.append(_figure(picture))
    return (f"<div>{''.join(parts)}</div>" if parts else "") + "".join(tables[:MAX_PICTURES])


def read_rows(table: RunPicture, limit: int) -> list[list[str]]:
    """Return at most `limit` rows of a table and its head, all of one length; wide tables lose their last columns."""
    rows: list[list[str]] = []
    with contextlib.suppress(csv.Error):  # Another program changed the file.
        for row in csv.reader(io.StringIO(table.data.decode("utf-8", "replace"))):
            if len(rows) > limit:
                break
            rows.append([one_line(cell, 200) for cell in row[:MAX_COLUMNS]])
    width = max(map(len, rows), default=0)
    return [row + [""] * (width - len(row)) for row in rows]


def without_formulas(data: bytes) -> bytes:
    """Return CSV with `'` before cells that a spreadsheet would take for a formula; numbers stay as they are."""
    text, safe = data.decode("utf-8", "replace"), io.StringIO()
    writer = csv.writer(safe, lineterminator="\n")
    with contextlib.suppress(csv.Error):
        writer.writerows([_inert(cell) for cell in row] for row in csv.reader(io.StringIO(text)))
    return safe.getvalue().encode()


def _inert(cell: str) -> str:
    if not cell.startswith(FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _table(table: RunPicture) -> str:
    head, *rows = read_rows(table, MAX_ROWS) or [[]]
    columns = [Column(name, cells) for name, cells in zip(head, zip(*rows, strict=True), strict=False)]
    return table_html(columns, caption=_caption(table))


def _caption(picture: RunPicture) -> str:
    return f"{one_line(picture.name, 60)}, rank {picture.rank}, step {picture.step}"


def _figure(picture: RunPicture) -> str:
    words = escape(_caption(picture))
    source = f"data:{picture.mime};base64,{base64.b64encode(picture.data).decode()}"
    style = "display:block;max-width:320px;max-height:320px;min-width:96px;image-rendering:pixelated"
    return f'<div style="{LOOK}"><div>{words}</div><img src="{source}" alt="{words}" style="{style}"></div>'
