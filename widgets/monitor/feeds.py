"""Curves, timelines and logs in a monitor's messages: the three long parts, each of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.legend import LIMITS
from notebook_launcher.history.curves import Curves, Point, thin
from notebook_launcher.history.usage import usage_points
from notebook_launcher.widgets.monitor.page_items import json_number
from notebook_launcher.wording.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from notebook_launcher.history.schema import MetricPoint, PhaseSpan, RankPhases, RankUsage, RunReader

__all__ = ["CurveFeed", "LaneFeed", "LogFeed", "UsageFeed"]

Item = dict[str, Any]
Points = list[Point]

MAX_SENT = 1000
"""Points of a curve that is sent as a whole."""
PAGE_POINTS = 1800
"""Points of a curve that are sent to the page before the whole curve is sent again, thinned; the page keeps 2,000."""
ALL_POINTS = 200_000
"""Points of all curves together in the first message: 3 MB."""
NEW_POINTS = 4000
"""New points of all curves together in an update."""
NEW_OF_A_CURVE = 24
"""New points of one curve in an update: a hundred a second, more than an eye follows."""
REPLACED = 20
"""Curves that are sent again as a whole in one update."""

ALL_SPANS = 16_384
NEW_SPANS = 2000

BYTES = 400_000
ALL_BYTES = 2_000_000
NEW_BYTES = 100_000
NEW_PIECES = 500
"""Pieces of the ranks' output whose order an update knows; a piece ends where another rank's output begins."""
FAR = 1 << 40
"""A position beyond the end of any log."""


class CurveFeed:
    """Metrics of a run as items CURVE."""

    def __init__(self) -> None:
        self.curves = Curves()
        self._num_sent: dict[tuple[str, int], int] = {}

    def fold(self, points: Iterable[MetricPoint]) -> Mapping[tuple[str, int], Points]:
        """Add the points that ranks reported. Return the new points of each curve, by name and rank."""
        return self.curves.fold(points)

    def everything(self) -> list[Item]:
        """Return all curves; the more curves there are, the fewer points each has."""
        keys = [(name, rank) for name in self.curves.names for rank in sorted(self.curves[name])]
        limit = min(MAX_SENT, max(16, ALL_POINTS // max(1, len(keys))))
        return [self._whole(key, limit) for key in keys]

    def news(self, new: Mapping[tuple[str, int], Points]) -> list[Item]:
        """Return the points that `fold` returned, to be appended, or whole curves that replace the page's."""
        limit = max(4, min(NEW_OF_A_CURVE, NEW_POINTS // max(1, len(new))))
        items, num_replaced = [], 0
        for key, values in new.items():
            if self._num_sent.get(key, 0) + min(len(values), limit) > PAGE_POINTS and num_replaced < REPLACED:
                num_replaced += 1
                items.append(self._whole(key, MAX_SENT))
            else:
                thinned = _thin_to_the_end(values, limit)
                self._num_sent[key] = self._num_sent.get(key, 0) + len(thinned)
                items.append(_curve(key, thinned, replace=False))
        return items

    def _whole(self, key: tuple[str, int], limit: int) -> Item:
        name, rank = key
        curve = self.curves[name][rank]
        points = _thin_to_the_end(curve.timed_points(), limit)
        self._num_sent[key] = len(points)
        return _curve(key, points, replace=True)


class UsageFeed:
    """Memory and load of a run's ranks as items CURVE."""

    def __init__(self) -> None:
        self._curves = CurveFeed()
        self._read_to: dict[int, float] = {}
        """By rank: the time of the newest sample that was read."""

    def everything(self, usage: Mapping[int, RankUsage]) -> list[Item]:
        """Return all curves."""
        self._read(usage)
        return self._curves.everything()

    def news(self, usage: Mapping[int, RankUsage]) -> list[Item]:
        """Return the samples since the last message."""
        return self._curves.news(self._read(usage))

    def _read(self, usage: Mapping[int, RankUsage]) -> Mapping[tuple[str, int], Points]:
        new = self._curves.fold(usage_points(usage, self._read_to))
        self._read_to.update({rank: samples.times[-1] for rank, samples in usage.items() if samples.times})
        return new


def _thin_to_the_end(points: Points, limit: int) -> Points:
    """Thin points, but keep the newest, which shows where the curve stands now."""
    return points if len(points) <= limit else [*thin(points[:-1], limit - 1), points[-1]]


def _curve(key: tuple[str, int], points: Points, *, replace: bool) -> Item:
    name, rank = key
    return {
        "name": name,
        "rank": rank,
        "steps": [step for step, _, _ in points],
        "values": [json_number(value) for _, value, _ in points],
        "times": [round(seconds, 3) for _, _, seconds in points],
        "replace": replace,
    }


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
