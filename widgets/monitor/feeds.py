"""Timelines, logs and pictures in a monitor's messages, each of bounded size."""

from __future__ import annotations

import base64
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.legend import LIMITS
from notebook_launcher.drawing.reported import TABLE, read_rows, without_formulas
from notebook_launcher.wording import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.history.schema import PhaseSpan, RankPhases, RunPicture, RunReader

Item = dict[str, Any]

ALL_SPANS = 16_384
NEW_SPANS = 2000

BYTES = 400_000
ALL_BYTES = 2_000_000
NEW_BYTES = 100_000
NEW_PIECES = 500
"""Pieces of the ranks' output whose order an update knows; a piece ends where another rank's output begins."""
FAR = 1 << 40
"""A position beyond the end of any log."""
ALL_PICTURES, NEW_PICTURES = 4_000_000, 500_000
"""Bytes of the pictures in the first message, and in an update; the newest of each name and rank is always sent."""
MAX_ROWS = 50
"""Rows of a table that the page shows; its CSV, to be downloaded, has all."""


class LaneFeed:
    """Phase spans of the ranks as items LANE."""

    def __init__(self) -> None:
        self._sent_to: dict[int, float] = {}

    def everything(self, phases: Mapping[int, RankPhases]) -> list[Item]:
        """Return the newest spans of each rank."""
        self._sent_to.clear()
        return self._lanes(phases, min(LIMITS.spans, ALL_SPANS // max(1, len(phases))))

    def news(self, phases: Mapping[int, RankPhases]) -> list[Item]:
        """Return the spans that began since the last message; of a flood, the newest."""
        return self._lanes(phases, NEW_SPANS // max(1, len(phases)))

    def _lanes(self, phases: Mapping[int, RankPhases], limit: int) -> list[Item]:
        lanes = [{"rank": rank, "spans": self._take(rank, phases[rank].spans, limit)} for rank in sorted(phases)]
        return [lane for lane in lanes if lane["spans"]]

    def _take(self, rank: int, spans: Sequence[PhaseSpan], limit: int) -> list[list[Any]]:
        since = self._sent_to.get(rank, float("-inf"))
        new: list[list[Any]] = []
        for span in reversed(spans):
            if span.start <= since or len(new) >= limit:
                break
            new.append([span.phase, round(span.start, 6), round(span.seconds, 6)])
        if new:
            self._sent_to[rank] = spans[-1].start
        return new[::-1]


class LogFeed:
    """Output of the ranks as items LOG."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._positions: dict[int, int] = {}

    def tails(self, num_ranks: int) -> list[Item]:
        """Return the last lines of each rank, as far as it is known in the order of their arrival."""
        limit = min(BYTES, ALL_BYTES // max(1, num_ranks))
        texts = {}
        for rank in range(num_ranks):
            start = max(0, self._end(rank) - limit)
            text, self._positions[rank] = self._reader.logs_since(rank, start)
            if start:
                text = text.partition("\n")[2]
            if text:
                # Not splitlines, which would count each redraw of a progress bar as a line.
                texts[rank] = "\n".join(text.split("\n")[-LIMITS.lines :])
        return self._in_order(texts, LIMITS.lines)

    def news(self, num_ranks: int) -> list[Item]:
        """Return the text that was written since the last message; of a flood, the end."""
        ends = {rank: self._end(rank) for rank in range(num_ranks)}
        waiting = [rank for rank, end in ends.items() if end > self._positions.get(rank, 0)]
        limit = NEW_BYTES // max(1, len(waiting))
        return self._in_order({rank: self._read(rank, ends[rank], limit) for rank in waiting}, NEW_PIECES)

    def _in_order(self, texts: Mapping[int, str], num_pieces: int) -> list[Item]:
        """Cut texts, each of which is the end of what was read of a rank's log, into items in the order of arrival."""
        order = self._reader.log_order(num_pieces) if len(texts) > 1 else ()
        # Positions count bytes. They are counted from the end, because the beginning may be a notice.
        rest = {rank: text.encode("utf-8", "replace") for rank, text in texts.items()}
        known = {rank for rank, _ in order}
        pieces = [(rank, rest.pop(rank)) for rank in texts if rank not in known]
        for rank, end in order:
            if rank in rest and (left := max(0, self._positions[rank] - end)) < len(rest[rank]):
                cut = len(rest[rank]) - left
                pieces.append((rank, rest[rank][:cut]))
                rest[rank] = rest[rank][cut:]
        pieces += rest.items()  # Arrived after the order was asked for.
        return [{"rank": rank, "text": data.decode("utf-8", "replace")} for rank, data in pieces if data]

    def _read(self, rank: int, end: int, limit: int) -> str:
        begin = self._positions.get(rank, 0)
        start = max(begin, end - limit)
        text, self._positions[rank] = self._reader.logs_since(rank, start)
        if start == begin:
            return text
        left_out = f"\n[... {format_bytes(start - begin)} not shown; run.logs({rank}) has everything ...]\n"
        return left_out + text.partition("\n")[2]

    def _end(self, rank: int) -> int:
        return self._reader.logs_since(rank, FAR)[1]


class ReportedPictureFeed:
    """Images, histograms and tables of a run as items PICTURE."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._position = 0

    def everything(self) -> list[Item]:
        """Return the newest pictures of each name and rank."""
        pictures, self._position = self._reader.pictures_since(0)
        return _picture_items(pictures, ALL_PICTURES)

    def news(self) -> list[Item]:
        """Return the pictures since the last message; of a flood, the newest."""
        pictures, self._position = self._reader.pictures_since(self._position)
        return _picture_items(pictures, NEW_PICTURES)


def _picture_items(pictures: Sequence[RunPicture], room: int) -> list[Item]:
    counts: defaultdict[tuple[str, int], int] = defaultdict(int)
    kept = []
    for picture in reversed(pictures):
        key = (picture.name, picture.rank)
        room -= len(picture.data)
        if counts[key] == 0 or (room >= 0 and counts[key] < LIMITS.pictures):
            counts[key] += 1
            kept.append(picture)
    return [_picture_item(picture) for picture in reversed(kept)]


def _picture_item(picture: RunPicture) -> Item:
    is_table = picture.mime == TABLE
    data = without_formulas(picture.data) if is_table else picture.data
    return {
        "name": picture.name,
        "rank": picture.rank,
        "step": picture.step,
        "rows": read_rows(picture, MAX_ROWS) if is_table else [],
        "source": f"data:{picture.mime};base64,{base64.b64encode(data).decode()}",
    }
