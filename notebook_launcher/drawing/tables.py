"""Tables in HTML and text. Styles are inline, because JupyterLab keeps these in a notebook that is not trusted.

Tables carry no class, id or `<style>`, so nothing of the page around them changes.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
from typing import TYPE_CHECKING, Literal

from notebook_launcher.drawing.legend import RANK_STATES, RUN_STATES
from notebook_launcher.wording import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


FEW_ROWS = 16
"""Rows in view; further rows are folded."""
MAX_ROWS = 200
MAX_TEXT_ROWS = 32
LEAST = 12
"""Characters that a column keeps in a narrow terminal."""

LINE = "1px solid rgba(128,128,128,.3)"
CELL = "padding:3px 16px 3px 0;vertical-align:baseline;border:0"
NO_WRAP = ";white-space:nowrap"
LONG = 20
"""Fewest characters of a text that may wrap, into lines that are not much shorter."""
WRAPPED = "text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:16ch"
_COLUMN_STYLES = {
    "text": f"text-align:left{NO_WRAP}",
    "number": f"text-align:right;font-variant-numeric:tabular-nums{NO_WRAP}",
    "state": f"text-align:left{NO_WRAP}",
    "curve": f"text-align:left;font-family:monospace;font-size:10px;opacity:.65{NO_WRAP}",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: name, cells as plain text, and the kind of the cells."""

    name: str
    cells: Sequence[str]
    kind: Literal["text", "number", "state", "curve"] = "text"
    can_shrink: bool = False
    """True for free text, of which a narrow terminal shows the beginning."""


def table_html(columns: Sequence[Column], *, caption: str = "", more: str = "more rows") -> str:
    """Return a table without empty columns; rows beyond the first 16 are folded.

    Args:
        columns: Columns of one length; this function escapes their text.
        caption: Text above the table, in bold.
        more: Name of the folded rows.
    """
    columns = [column for column in columns if any(column.cells)]
    num_rows = len(columns[0].cells) if columns else 0
    heading = f'<div style="font-weight:600;margin:14px 0 2px">{escape(caption)}</div>' if caption else ""
    body = heading + _rows_html(columns, 0, FEW_ROWS)
    if num_rows > FEW_ROWS:
        rest = _rows_html(columns, FEW_ROWS, MAX_ROWS)
        left_out = f"<div>{num_rows - MAX_ROWS:,} more are not shown.</div>" if num_rows > MAX_ROWS else ""
        body += folded(f"{num_rows - FEW_ROWS} {more}", rest + left_out)
    return body


def _rows_html(columns: Sequence[Column], start: int, stop: int) -> str:
    def cell(column: Column, value: str) -> str:
        body = state_html(value) if column.kind == "state" else escape(value)
        style = WRAPPED if column.kind == "text" and len(value) > LONG else _COLUMN_STYLES[column.kind]
        return f'<td style="{CELL};{style}">{body}</td>'

    head = "".join(
        f'<th style="{CELL}{NO_WRAP};border-bottom:{LINE};font-weight:600;text-align:'
        f'{"right" if column.kind == "number" else "left"}">{escape(column.name)}</th>'
        for column in columns
    )
    rows = zip(*(column.cells[start:stop] for column in columns), strict=True)
    body = "".join(
        '<tr style="background:none">'
        + "".join(cell(column, value) for column, value in zip(columns, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;border:0;margin:0;font-size:13px">'
        f'<thead><tr style="background:none">{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def state_html(state: str, words: str = "") -> str:
    """Return a state's word, or other words for it, behind its sign."""
    look = {**RUN_STATES, **RANK_STATES}.get(state, RANK_STATES["unknown"])
    style = f"color:{look.colour};" if look.colour else ""
    return f'<span style="{style}font-weight:600;white-space:nowrap">{look.sign} {escape(words or state)}</span>'


def folded(summary: str, body: str, *, opened: bool = False) -> str:
    """Return a part of the page that opens with a click.

    Args:
        summary: Plain text.
        body: HTML.
        opened: True if it is open at first.
    """
    return (
        f'<details style="margin:8px 0"{" open" * opened}><summary style="cursor:pointer">{escape(summary)}</summary>'
        f"{body}</details>"
    )


def terminal_width() -> int | None:
    """Return the width of the terminal that shows standard output; None if a file, a pipe or a notebook takes it."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_text(
    columns: Sequence[Column],
    width: int | None = None,
    *,
    dispensable: Sequence[str] = (),
    most: int = MAX_TEXT_ROWS,
) -> list[str]:
    """Return a table as lines of text, without empty columns.

    Args:
        columns: Columns of one length.
        width: Characters of a line; None: any number. The widest columns that can shrink are shortened first, then
            columns are left out, and at last lines are cut.
        dispensable: Names of columns that may be left out, the first of them first.
        most: Rows at most.
    """
    columns = [column for column in columns if any(column.cells)]
    if not columns:
        return []
    num_rows = len(columns[0].cells)
    widths = [max(map(len, (column.name, *column.cells[:most]))) for column in columns]
    if width is not None:
        columns, widths = _fit(columns, widths, width, dispensable)

    def row(cells: Sequence[str]) -> str:
        line = "  ".join(
            _cut(cell, room).rjust(room) if column.kind == "number" else _cut(cell, room).ljust(room)
            for cell, room, column in zip(cells, widths, columns, strict=True)
        )
        return line if width is None else _cut(line.rstrip(), width)

    rows = [row([column.name for column in columns])]
    rows += [row([column.cells[at] for column in columns]) for at in range(min(num_rows, most))]
    return rows + ([f"... {num_rows - most} more"] if num_rows > most else [])


def _fit(
    columns: Sequence[Column], widths: Sequence[int], width: int, dispensable: Sequence[str]
) -> tuple[list[Column], list[int]]:
    """Return the columns for which there is room, with their widths."""
    kept, rest = dict(enumerate(widths)), [name for name in dispensable if name in {column.name for column in columns}]
    while sum(kept.values()) + 2 * (len(kept) - 1) > width:
        flexible = [at for at, room in kept.items() if columns[at].can_shrink and room > LEAST]
        if flexible:
            kept[max(flexible, key=kept.__getitem__)] -= 1
        elif rest:
            left_out = rest.pop(0)
            kept = {at: room for at, room in kept.items() if columns[at].name != left_out}
        else:
            break
    return [columns[at] for at in kept], list(kept.values())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)].rstrip() + "…"


def note_html(note: str) -> str:
    """Return a line in a weaker ink; an empty text for an empty note."""
    return f'<div style="opacity:.75">{escape(note)}</div>' if note else ""


def joined(parts: Iterable[str]) -> str:
    """Return the parts of a page in one element."""
    return f'<div style="font-size:13px;line-height:1.45;max-width:1000px">{"".join(parts)}</div>'


# --------------------------------------------------------------------------------------------------------------------
# Curves as text, for front ends without pictures: `█▆▅▃▂▁`.


BLOCKS = "▁▂▃▄▅▆▇█"


def spark_line(points: Sequence[tuple[float, float]], width: int = 24) -> str:
    """Return a curve in at most `width` characters: each is the mean of an interval, a cross if it is not finite."""
    if not points:
        return ""
    num = min(width, len(points))
    stretches = [points[at * len(points) // num : (at + 1) * len(points) // num] for at in range(num)]
    means = [sum(value / len(stretch) for _, value in stretch) for stretch in stretches]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    # By halves: the difference of two large values of different sign overflows.
    room = high / 2 - low / 2
    return "".join(
        BLOCKS[int(7.999 * ((mean / 2 - low / 2) / room if room > 0 else 0.45))] if math.isfinite(mean) else "×"  # noqa: RUF001
        for mean in means
    )
