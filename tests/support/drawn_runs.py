"""Runs to draw, and readers of what was drawn, which check it."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.legend import PHASES
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.schema import MetricPoint, PhaseSpan, RankPhases, RankSnapshot, RunSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


NAN, INF = math.nan, math.inf
CROSS = "\N{MULTIPLICATION SIGN}"
EVIL = "<script>alert('x')</script> \"q\" & \x1b[31mred\x1b[0m \x00\x07 \ud800 \u202e ]]> </svg>"
ALLOWED = {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "img"}


def curves_of(values: Mapping[str, Mapping[int, Iterable[float]]]) -> Curves:
    """Curves by name and rank, at steps 0, 1, ..."""
    curves = Curves()
    for name, ranks in values.items():
        for rank, column in ranks.items():
            curves.fold(MetricPoint(rank=rank, step=step, time=0.0, values={name: v}) for step, v in enumerate(column))
    return curves


def phases_of(num_ranks: int, num_windows: int = 12) -> dict[int, RankPhases]:
    def told(rank: int) -> RankPhases:
        spans, now = [], 1.0 + rank / 1000
        for _, (place, phase) in itertools.product(range(num_windows), enumerate(PHASES)):
            spans.append(PhaseSpan(phase=phase, start=now, seconds=0.01 * (place + 1)))
            now += spans[-1].seconds
        seconds = {phase: 0.01 * (place + 1) * num_windows for place, phase in enumerate(PHASES)}
        counts = dict.fromkeys(PHASES, num_windows)
        return RankPhases(
            windows=num_windows, micro_batches=4 * num_windows, seconds=seconds, counts=counts, spans=tuple(spans)
        )

    return {rank: told(rank) for rank in range(num_ranks)}


def run_of(num_ranks: int = 2, **fields: Any) -> RunSnapshot:
    ranks = tuple(
        RankSnapshot(rank=rank, state="returned", seconds=1.5, peak_memory=250_000_000, returned=f"[{rank}]", step=9)
        for rank in range(num_ranks)
    )
    given: dict[str, Any] = {
        "id": "20261121-142501-train-3f9c",
        "name": "train",
        "state": "done",
        "started": 1_795_000_000.0,
        "seconds": 12.0,
        "num_processes": num_ranks,
        "summary": f"{num_ranks} CPU ranks, gloo",
        "seed": 7,
        "config": {"num_processes": num_ranks, "env": {"TOKEN": "hidden-value"}},
        "ranks": ranks,
    }
    return RunSnapshot(**{**given, **fields})


# Reading back what was drawn.


def parse_svg(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag.endswith("}svg")
    _check_svg(root, float(root.attrib["width"]), float(root.attrib["height"]))
    return root


def _check_svg(root: ET.Element, width: float, height: float) -> None:
    assert root.attrib["viewBox"] == f"0 0 {root.attrib['width']} {root.attrib['height']}"
    assert width < 4000
    assert height < 6000
    assert "NaN" not in "".join(element.attrib.get("d", "") for element in root.iter())
    for element in root.iter():
        assert not element.tag.endswith(("script", "style", "foreignObject", "image", "a"))
        for name, value in element.attrib.items():
            assert not name.lower().startswith("on")
            assert not name.endswith("href")
            assert "url(" not in value or re.fullmatch(r"url\(#nbl[0-9a-f]{8}\w+\)", value)


def words_of(svg: str) -> list[str]:
    """Return the texts in a picture, without tooltips."""
    return [element.text or element[0].tail or "" for element in parse_svg(svg).iter() if element.tag.endswith("}text")]


class Balanced(HTMLParser):
    """Fails at a tag that is not closed where it should be, and at what is not allowed in a static page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        for name, value in attrs:
            assert name in {"style", "open", "src", "alt"}, name
            assert "url(" not in (value or "")
            assert name != "src" or (value or "").startswith("data:image/svg+xml;base64,")
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)
