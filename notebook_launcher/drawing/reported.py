"""Pictures and tables that ranks reported, as HTML that a saved notebook keeps."""

from __future__ import annotations

import base64
import contextlib
import csv
import html
import io
from typing import TYPE_CHECKING, Any

from notebook_launcher.colours import SERIES
from notebook_launcher.drawing.scales import SIZE, SvgPicture, document, pixels, stack, text
from notebook_launcher.drawing.tables import MAX_ROWS, Column, table_html
from notebook_launcher.wording import escape, format_share, one_line, plural, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from notebook_launcher.history.schema import RunPicture
    from notebook_launcher.history.summaries import Flame, FlameFrame


TABLE = "text/csv"
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001 - wide characters count, too
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
    # In some countries `;` parts the cells that are not in quotes.
    writer = csv.writer(safe, lineterminator="\n", quoting=csv.QUOTE_ALL if ";" in text else csv.QUOTE_MINIMAL)
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


# --------------------------------------------------------------------------------------------------------------------
# Rich output of several ranks as HTML: a tab for each rank, and one tab for ranks with equal output.
#
# The tabs are radio buttons and style rules, without a script. Where a front end removes both, as for a notebook that
# is not trusted, the parts stand below each other, each with its heading.


IMAGES = ("image/png", "image/jpeg", "image/gif")
STYLE = (
    "{key}>input,{key}>section,{key}>section>h4{{display:none}}"
    "{key}>label{{display:inline-block;padding:2px 10px;cursor:pointer;border-bottom:2px solid transparent;opacity:.7}}"
    "{key}>input:checked+label{{border-color:{colour};opacity:1;font-weight:600}}"
    "{key}>input:focus-visible+label{{outline:2px solid {colour}}}"
)


def rank_tabs(panels: Mapping[int, Sequence[Mapping[str, Any]]], key: str) -> str:
    """Return the bundles of each rank in tabs; `key` is a word that no other output on the page uses."""
    contents: dict[str, list[int]] = {}
    for rank, bundles in sorted(panels.items()):
        contents.setdefault("".join(map(bundle_as_html, bundles)), []).append(rank)
    style, tabs, sections = STYLE.format(key=f".{key}", colour=SERIES[0]), "", ""
    for number, (content, ranks) in enumerate(contents.items()):
        name = f"{key}-{number}"
        title = rank_list(ranks)
        checked = " checked" if number == 0 else ""
        style += f"#{name}:checked~#{name}-of{{display:block}}"
        tabs += f'<input type="radio" name="{key}" id="{name}"{checked}><label for="{name}">{title}</label>'
        sections += f'<section id="{name}-of" style="padding:6px 0"><h4>{title}</h4>{content}</section>'
    return f'<div class="{key}"><style>{style}</style>{tabs}{sections}</div>'


def bundle_as_html(bundle: Mapping[str, Any]) -> str:
    """Return the richest form of a bundle that HTML can hold."""
    if "text/html" in bundle:
        return f"<div>{bundle['text/html']}</div>"
    if "image/svg+xml" in bundle:
        return f"<div>{bundle['image/svg+xml']}</div>"
    for kind in IMAGES:
        if kind in bundle:
            data = bundle[kind]
            text = base64.b64encode(data).decode() if isinstance(data, bytes) else str(data).replace("\n", "")
            words = html.escape(str(bundle.get("text/plain", "")), quote=True)
            return f'<div><img alt="{words}" style="max-width:100%" src="data:{kind};base64,{text}"></div>'
    return f'<pre style="margin:0;white-space:pre-wrap">{html.escape(str(bundle.get("text/plain", "")))}</pre>'


# --------------------------------------------------------------------------------------------------------------------
# Sampled calls as a flame drawing: a column for each rank, callers above the functions that they called.


COLUMN = 230.0
"""Smallest width of a rank's column, in pixels."""
GAP, ROW, HEAD = 14.0, 17.0, 20.0
MAX_DEPTH = 30
MAX_RANKS = 16
LEAST = 1.5
"""Pixels below which a function is not drawn."""
OWN, WAIT, LIBRARY = SERIES[0], SERIES[5], SERIES[2]


def flame_svg(flames: Sequence[Flame], *, width: float = 960.0) -> str:
    """Return the calls of all ranks as one `<svg>`: the user's code, libraries and waits in a colour each.

    Args:
        flames: The sampled calls of each rank; of more than 16 ranks the first 16 are drawn.
        width: In pixels; a page that is narrower scales the picture down.
    """
    shown = flames[:MAX_RANKS]
    columns = max(1, min(len(shown), int((width + GAP) // (COLUMN + GAP))))
    room = (width - GAP * (columns - 1)) / columns
    rows = [_row(shown[start : start + columns], room) for start in range(0, len(shown), columns)]
    note = f", {len(flames) - MAX_RANKS} more are not drawn" if len(flames) > MAX_RANKS else ""
    title = f"Where the time of {plural(len(flames), 'rank')} goes, by sampled stacks{note}"
    return document(stack([_legend(width), *rows], gap=16), title)


def _legend(width: float) -> SvgPicture:
    words = (("your code", OWN), ("libraries", LIBRARY), ("waits for other ranks", WAIT))
    body = "".join(
        f'<rect x="{pixels(at * 170)}" y="3" width="12" height="12" fill="{colour}"/>' + text(at * 170 + 18, 13, label)
        for at, (label, colour) in enumerate(words)
    )
    return SvgPicture(width, 18, body)


def _row(flames: Sequence[Flame], room: float) -> SvgPicture:
    parts, depth = [], 0
    for place, flame in enumerate(flames):
        boxes = list(_boxes(flame.frames, 0.0, room / max(flame.num_samples, 1), 0))
        depth = max([depth, *(level + 1 for _, level in boxes)])
        waits = f", {format_share(flame.wait_share)} waits" if flame.wait_share else ""
        head = f"rank {flame.rank}: {plural(flame.num_samples, 'sample')}{waits}"
        body = text(0, 13, head, bold=True, size=SIZE, width=room) + "".join(box for box, _ in boxes)
        parts.append(f'<g transform="translate({pixels(place * (room + GAP))} 0)">{body}</g>')
    return SvgPicture((room + GAP) * len(flames) - GAP, HEAD + depth * ROW, "".join(parts))


def _boxes(frames: Sequence[FlameFrame], left: float, scale: float, depth: int) -> Iterator[tuple[str, int]]:
    """Yield the boxes of functions and of all that they called, each with its depth."""
    for frame in frames:
        width = frame.count * scale
        if width >= LEAST and depth < MAX_DEPTH:
            yield _box(frame, left, width, HEAD + depth * ROW), depth
            yield from _boxes(frame.children, left, scale, depth + 1)
        left += width


def _box(frame: FlameFrame, left: float, width: float, top: float) -> str:
    colour = WAIT if frame.is_wait else LIBRARY if frame.is_library else OWN
    place = f", {frame.place}" if frame.place else ""
    title = f"{one_line(frame.name, 200)}{one_line(place, 300)}: {plural(frame.count, 'sample')}"
    label = text(left + 4, top + 12, one_line(frame.name, 200), width=width - 8, fill="#ffffff") if width > 30 else ""
    return (
        f'<g><title>{escape(title)}</title><rect x="{pixels(left)}" y="{pixels(top)}" '
        f'width="{pixels(max(width - 1, 0.5))}" height="{pixels(ROW - 1)}" fill="{colour}"/>{label}</g>'
    )
