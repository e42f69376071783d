"""Timeline of the ranks: a lane for each rank over its last windows, and the share of each phase as text.

A phase has a colour, a letter, and a pattern or a height of its own. Each of these alone identifies it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from typing import TYPE_CHECKING

from notebook_launcher.drawing.legend import LIMITS, PHASES
from notebook_launcher.drawing.scales import (
    SIZE,
    Scale,
    SvgPicture,
    document,
    make_scale,
    pixels,
    stack,
    text,
    tick_labels,
)
from notebook_launcher.history.summaries import measure_sync
from notebook_launcher.wording import format_seconds, format_share, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from notebook_launcher.drawing.legend import PhaseLook
    from notebook_launcher.history.schema import PhaseSpan, RankPhases


MAX_WINDOWS = 6
"""Last updates of a rank that are shown."""
MAX_DRAWN_SPANS = 96
"""Spans of a rank that are shown if its windows are long."""
FEW_RANKS = 16
"""Number of ranks up to which lanes are high and each rank has its own row of shares."""
LABEL, GAP = 58.0, 16.0
"""Width of a rank's name, and gap between the lanes and the table of shares, in pixels."""
SWATCH = 30.0


def timeline_svg(phases: Mapping[int, RankPhases], *, width: float = 720.0) -> str:
    """Return the ranks' last windows as one `<svg>`, beside the share that each phase had of the whole run.

    Args:
        phases: Phases by rank, as in `RunSnapshot.phases`. At most 64 ranks are drawn; a note counts the others.
        width: Width in pixels.
    """
    return document(timeline_picture(phases, width=width), "Where the time of the ranks goes")


def timeline_picture(phases: Mapping[int, RankPhases], *, width: float = 720.0) -> SvgPicture:
    """Return the picture that `timeline_svg` puts into a document; a sentence if nothing was measured."""
    known = {rank: own for rank, own in sorted(phases.items()) if own.spans}
    if not known:
        return SvgPicture(width, 20, text(0, 14, "No phases measured: only loops that use an Accelerator report them."))
    shown = dict(list(known.items())[: LIMITS.lanes])
    start, end = _stretch(shown)
    lanes = _Lanes(shown, start, end, width)
    parts = [lanes.draw()]
    notes = sync_text(phases).replace("). ", ").\n").splitlines()  # A line for each sentence.
    if len(known) > len(shown):
        notes.append(f"{plural(len(known) - len(shown), 'more rank')} not drawn.")
    lines = "".join(text(0, 11 + 16 * at, note, width=width) for at, note in enumerate(notes))
    parts += [SvgPicture(width, 16.0 * len(notes), lines)] if notes else []
    return stack(parts, gap=12)


def mean_shares(phases: Mapping[int, RankPhases]) -> dict[str, float]:
    """Return each phase's part of the measured time, 0 to 1, as the mean over the ranks."""
    known = [rank.shares for rank in phases.values() if any(rank.seconds.values())]
    return {phase: sum(shares.get(phase, 0.0) for shares in known) / len(known) for phase in PHASES} if known else {}


def sync_text(phases: Mapping[int, RankPhases]) -> str:
    """Return the cost of waiting for other ranks and the time saved by accumulation; empty if not measured."""
    cost = measure_sync(phases.values())
    return "" if cost.mean_seconds is None else cost.text


def _stretch(phases: Mapping[int, RankPhases]) -> tuple[float, float]:
    """Return the interval in seconds that is shown: the last windows of the rank whose spans end first."""
    last = min(phases.values(), key=lambda own: _end(own.spans[-1]))
    spans = last.spans[-MAX_DRAWN_SPANS:]
    updates = [span for span in spans if span.phase == "step"]
    start = spans[0].start
    if len(updates) > MAX_WINDOWS:
        start = _end(updates[-MAX_WINDOWS - 1])
    return start, max(_end(last.spans[-1]), start + 1e-6)


def _end(span: PhaseSpan) -> float:
    return span.start + span.seconds


class _Lanes:
    """The lanes of all ranks on one axis of time, with a table of shares at their right."""

    def __init__(self, phases: Mapping[int, RankPhases], start: float, end: float, width: float) -> None:
        self._phases, self._width = phases, width
        self._few = len(phases) <= FEW_RANKS
        self._row, self._height = (24.0, 18.0) if self._few else (9.0, 7.0)
        self._top = 58.0
        self._bottom = self._top + self._row * len(phases)
        self._left = LABEL
        self._shares = width - sum(look.room for look in PHASES.values())
        rights = itertools.accumulate((look.room for look in PHASES.values()), initial=self._shares)
        self._rights = dict(zip(PHASES, itertools.islice(rights, 1, None), strict=True))
        x = make_scale((start, end), self._left, self._shares - GAP, margin=0.0)
        assert x is not None
        self._x: Scale = x
        self._start = start
        key = repr((len(phases), start, end, width)).encode()
        # Two pictures on a page must not share the names of their patterns: the first may be hidden.
        self._prefix = f"nbl{hashlib.sha256(key).hexdigest()[:8]}"

    def draw(self) -> SvgPicture:
        words = f"{format_seconds(self._x.high - self._x.low)}, from {format_seconds(self._x.low)} after the launch"
        title = text(0, 13, "Last windows", bold=True, size=SIZE) + text(0, 30, words, width=self._shares - GAP)
        body = self._patterns() + title + self._heads()
        rows = (self._lane(place, rank) for place, rank in enumerate(self._phases))
        body += "".join(rows) + self._axis() + ("" if self._few else self._summary())
        return SvgPicture(self._width, self._bottom + 23, body)

    def _patterns(self) -> str:
        def pattern(name: str, look: PhaseLook) -> str:
            ink = look.pattern and f'<path d="{look.pattern}" stroke="#fff" stroke-opacity="0.55" stroke-width="1.2"/>'
            return (
                f'<pattern id="{self._prefix}{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
                f'<rect width="6" height="6" fill="{look.colour}"/>{ink}</pattern>'
            )

        return f"<defs>{''.join(pattern(name, look) for name, look in PHASES.items())}</defs>"

    def _heads(self) -> str:
        """Return the legend, which heads the columns of the shares."""
        last = self._rights["step"]
        parts = [text(last, 13, "Share of the measured time", anchor="end", bold=True, size=SIZE)]
        for name, look in PHASES.items():
            right = self._rights[name]
            top, height = (22.0, 16.0) if look.height == 1 else (30.0, 8.0)
            parts.append(
                f'<rect x="{pixels(right - SWATCH)}" y="{pixels(top)}" width="{pixels(SWATCH)}" '
                f'height="{pixels(height)}" rx="1.5" fill="url(#{self._prefix}{name})"/>'
            )
            parts.append(self._letter(look, right - SWATCH / 2, 34.0) if look.height == 1 else "")
            parts.append(text(right, 51, look.word, anchor="end"))
        return "".join(parts)

    def _lane(self, place: int, rank: int) -> str:
        top = self._top + self._row * place
        base = top + self._height / 2 + 4
        body = "".join(self._spans(rank, top))
        if self._few:
            return text(0, base, f"rank {rank}") + body + self._row_of_shares(self._phases[rank].shares, base)
        return body + (text(0, base, f"rank {rank}") if place % 8 == 0 else "")

    def _spans(self, rank: int, top: float) -> Iterator[str]:
        rects: dict[str, list[str]] = {}
        letters: list[str] = []
        last = dict.fromkeys(PHASES, -1.0)
        for span in self._phases[rank].spans:
            left, right = self._x(span.start), self._x(_end(span))
            # What is thinner than a third of a pixel is drawn where nothing of its phase is yet.
            if span.phase not in PHASES or _end(span) <= self._start or right - last[span.phase] < 0.34:
                continue
            look, last[span.phase] = PHASES[span.phase], right
            height = self._height * look.height
            width = max(right - left - (0.6 if right - left > 3 else 0), 0.4)
            y, w, h = pixels(top + self._height - height), f"{width:.2f}", pixels(height)
            rects.setdefault(span.phase, []).append(f"M{left:.2f} {y}h{w}v{h}h-{w}z")
            if self._few and width >= 14 and look.height == 1:
                letters.append(self._letter(look, (left + right) / 2, top + self._height / 2 + 4))
        for name, paths in rects.items():
            title = f"<title>{PHASES[name].word}</title>"
            yield f'<path d="{"".join(paths)}" fill="url(#{self._prefix}{name})">{title}</path>'
        yield from letters

    def _letter(self, look: PhaseLook, middle: float, base: float) -> str:
        # On a plate of its own: a pattern would cut through it.
        place = f'x="{pixels(middle - 6)}" y="{pixels(base - 11)}" width="12" height="14" rx="2"'
        return f'<rect {place} fill="{look.colour}"/>' + text(
            middle, base, look.letter, anchor="middle", bold=True, fill="#fff"
        )

    def _row_of_shares(self, shares: Mapping[str, float], base: float) -> str:
        return "".join(
            text(right, base, format_share(shares.get(name, 0.0)), anchor="end") for name, right in self._rights.items()
        )

    def _summary(self) -> str:
        """Return the lowest, mean and highest share of each phase over many ranks."""
        rows: Sequence[tuple[str, dict[str, float]]] = (
            ("lowest", {name: min(rank.shares.get(name, 0.0) for rank in self._phases.values()) for name in PHASES}),
            ("mean", mean_shares(self._phases)),
            ("highest", {name: max(rank.shares.get(name, 0.0) for rank in self._phases.values()) for name in PHASES}),
        )
        body = ""
        for place, (label, shares) in enumerate(rows):
            base = self._top + 14 + 36 * place
            body += text(self._shares, base, label) + self._row_of_shares(shares, base + 15)
        return body

    def _axis(self) -> str:
        x = dataclasses.replace(self._x, low=0.0, high=self._x.high - self._x.low)
        unit, name = (1.0, "s") if x.high >= 1 else (1e3, "ms")
        x = dataclasses.replace(x, high=x.high * unit)
        ticks = x.ticks(max(2, int((x.end - x.start) / 90)))
        marks = "".join(f"M{pixels(x(tick))} {pixels(self._bottom + 2)}v4" for tick in ticks)
        labels = "".join(
            text(max(x(tick), x.start), self._bottom + 19, f"{label} {name}", anchor="middle" if tick else "start")
            for tick, label in zip(ticks, tick_labels(ticks), strict=True)
            if x(tick) < x.end - 12
        )
        line = f"M{pixels(x.start)} {pixels(self._bottom + 2)}H{pixels(x.end)}"
        return f'<path d="{line}{marks}" stroke="currentColor" stroke-opacity="0.7"/>{labels}'
