"""Pictures and tables in a monitor's messages: the newest of each name and rank, of bounded size."""

from __future__ import annotations

import base64
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.legend import LIMITS
from notebook_launcher.drawing.reported import TABLE, read_rows, without_formulas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.history.schema import RunPicture, RunReader

Item = dict[str, Any]
ALL_BYTES = 4_000_000
"""Bytes of the pictures in the first message."""
MAX_ROWS = 50
"""Rows of a table that the page shows; its CSV, to be downloaded, has all."""
NEW_BYTES = 500_000
"""Bytes of the pictures in an update; the newest picture of each name and rank is always sent."""


class ReportedPictureFeed:
    """Images, histograms and tables of a run as items PICTURE."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._position = 0

    def everything(self) -> list[Item]:
        """Return the newest pictures of each name and rank."""
        pictures, self._position = self._reader.pictures_since(0)
        return _items(pictures, ALL_BYTES)

    def news(self) -> list[Item]:
        """Return the pictures since the last message; of a flood, the newest."""
        pictures, self._position = self._reader.pictures_since(self._position)
        return _items(pictures, NEW_BYTES)


def _items(pictures: Sequence[RunPicture], room: int) -> list[Item]:
    counts: defaultdict[tuple[str, int], int] = defaultdict(int)
    kept = []
    for picture in reversed(pictures):
        key = (picture.name, picture.rank)
        room -= len(picture.data)
        if counts[key] == 0 or (room >= 0 and counts[key] < LIMITS.pictures):
            counts[key] += 1
            kept.append(picture)
    return [_item(picture) for picture in reversed(kept)]


def _item(picture: RunPicture) -> Item:
    is_table = picture.mime == TABLE
    data = without_formulas(picture.data) if is_table else picture.data
    return {
        "name": picture.name,
        "rank": picture.rank,
        "step": picture.step,
        "rows": read_rows(picture, MAX_ROWS) if is_table else [],
        "source": f"data:{picture.mime};base64,{base64.b64encode(data).decode()}",
    }
