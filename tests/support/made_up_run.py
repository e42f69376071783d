"""A run that a test makes up, as a reader of runs sees it, and what messages about it hold."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from notebook_launcher.history.schema import MetricPoint, RankPhases, RankSnapshot, RunPicture, RunSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.widgets.monitor.feed import Feed


@dataclasses.dataclass
class Reader:
    """A run that is what the test says."""

    ranks: tuple[RankSnapshot, ...] = (RankSnapshot(rank=0, state="running"),)
    metrics: list[MetricPoint] = dataclasses.field(default_factory=list)
    pictures: list[RunPicture] = dataclasses.field(default_factory=list)
    logs: dict[int, str] = dataclasses.field(default_factory=dict)
    phases: dict[int, RankPhases] = dataclasses.field(default_factory=dict)
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 1.0

    def snapshot(self) -> RunSnapshot:
        fields: dict[str, Any] = {
            "id": "1",
            "name": "train",
            "state": "running",
            "started": 0.0,
            "seconds": self.seconds,
            "summary": "",
            "seed": 0,
            "num_processes": len(self.ranks),
        }
        return RunSnapshot(**{**fields, "ranks": self.ranks, "phases": self.phases, **self.fields})

    def metrics_since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
        return self.metrics[position:], len(self.metrics)

    def pictures_since(self, position: int) -> tuple[Sequence[RunPicture], int]:
        return self.pictures[position:], len(self.pictures)

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        text = self.logs.get(rank, "")
        return text[position:], len(text)

    def log_order(self, num_pieces: int) -> list[tuple[int, int]]:
        return []

    def report(self, step: int, rank: int = 0, /, **values: float) -> None:
        self.metrics.append(MetricPoint(rank=rank, step=step, time=0.0, values=values))


def news(feed: Feed) -> dict[str, Any]:
    """Return the next update of a feed, which must have news."""
    update = feed.update()
    assert update is not None
    return update


def points(message: Any) -> int:
    return sum(len(line["x"]) for plot in message.get("plots", ()) for line in plot["lines"])


class Drawn:
    """The lines of a page's plots, after some messages: by title and label the places and the values."""

    def __init__(self, *messages: Any) -> None:
        self.lines: dict[tuple[str, str], tuple[list[float], list[float | None]]] = {}
        for message in messages:
            self.add(message)

    def add(self, message: Any) -> None:
        for plot in message.get("plots", ()):
            for line in plot["lines"]:
                key = plot["title"], line["label"]
                x, y = self.lines.get(key, ([], []))
                self.lines[key] = x[: line["keep"]] + line["x"], y[: line["keep"]] + line["y"]
