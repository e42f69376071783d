"""Sampled calls as a flame drawing: a column for each rank, callers above the functions that they called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.colours import SERIES
from notebook_launcher.drawing.svg import SIZE, SvgPicture, document, pixels, stack, text
from notebook_launcher.wording.counts import plural
from notebook_launcher.wording.text import escape, one_line
from notebook_launcher.wording.units import format_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from notebook_launcher.history.flames import Flame, FlameFrame

__all__ = ["flame_svg"]

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
