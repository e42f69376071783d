"""Messages of a monitor to its page: the whole run at first, then only new data.

Plain data in, plain data out: no widget, no thread, no clock. A message stays small whatever the run does: about
100 kB, the first one at most some MB. A flood of points is thinned, and of a long log the page gets the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.legend import legend_item
from notebook_launcher.widgets.monitor.feeds import CurveFeed, LaneFeed, LogFeed, UsageFeed
from notebook_launcher.widgets.monitor.list_feeds import (
    AnswerFeed,
    FindingFeed,
    GrowingFeed,
    NoticeFeed,
    SettingFeed,
)
from notebook_launcher.widgets.monitor.page_items import (
    change_items,
    error_items,
    rank_items,
    run_item,
    setting_items,
)
from notebook_launcher.widgets.monitor.reported_picture_feed import ReportedPictureFeed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.history.curves import Curves, Point
    from notebook_launcher.history.schema import RunReader, RunSnapshot

__all__ = ["Feed"]

Message = dict[str, Any]

REFRESH_SECONDS = 1.0
"""Seconds between two messages with values that change all the time: the run's age and memory."""
VOLATILE = ("memory", "gpu_memory", "gpu_utilization")


class Feed:
    """The messages about one run. Not thread-safe.

    Args:
        reader: The run: live, over, or read from its folder.
        can_act: True if the run can be stopped and saved from the page.
    """

    def __init__(self, reader: RunReader, *, can_act: bool = False) -> None:
        self.can_act = can_act
        self.action_hint = ""
        """Text beside the buttons, if they do not work at once."""
        self._reader = reader
        self._curves = CurveFeed()
        self._logs = LogFeed(reader)
        self._pictures = ReportedPictureFeed(reader)
        self._lanes = LaneFeed()
        self._usage = UsageFeed()
        self._position = 0
        """Position in the run's metrics up to which they were read."""
        self._errors = GrowingFeed[Message]()
        self._changes = GrowingFeed[Message]()
        self._settings = SettingFeed()
        self._notices = NoticeFeed()
        self._answers = AnswerFeed()
        self._findings = FindingFeed()
        self._run: Message = {}
        """The item RUN that was sent last."""
        self._ranks: dict[int, Message] = {}
        """By rank: the item RANK that was sent last."""
        self._refreshed = 0.0
        """The run's age in seconds when values that change all the time were sent last."""

    @property
    def curves(self) -> Curves:
        """Curves of the metrics that have been read so far."""
        return self._curves.curves

    def notice(self, text: str) -> None:
        """Add a line for the user to the next message."""
        self._notices.add(text)

    def answer(self, name: str, problem: str) -> None:
        """Answer the page's request to change a setting: the reason why it cannot be; empty: it was passed on."""
        self._answers.add({"name": name, "problem": problem})

    def finding(self, item: Message) -> None:
        """Add an item FINDING to the next message; the last one of each kind is kept for a page that is reloaded."""
        self._findings.add(item)

    def reset(self) -> Message:
        """Return a message with the whole run."""
        snapshot = self._reader.snapshot()
        self.read_metrics()
        self._run, self._ranks = self._run_item(snapshot), _rank_items(snapshot)
        self._refreshed = snapshot.seconds
        return {
            "type": "reset",
            "legend": legend_item(),
            "run": self._run,
            "ranks": list(self._ranks.values()),
            "curves": self._curves.everything(),
            "pictures": self._pictures.everything(),
            "lanes": self._lanes.everything(snapshot.phases),
            "usage": self._usage.everything(snapshot.usage),
            "logs": self._logs.tails(snapshot.num_processes),
            "errors": self._errors.everything(error_items(snapshot)),
            "notices": self._notices.everything(),
            "settings": self._settings.everything(setting_items(snapshot)),
            "changes": self._changes.everything(change_items(snapshot)),
            "answers": self._answers.everything(),
            "findings": self._findings.everything(),
        }

    def update(self) -> Message | None:
        """Return a message with the data that is new since the last one; None if there is none."""
        snapshot = self._reader.snapshot()
        news: Message = {
            "run": self._new_run(snapshot),
            "ranks": self._new_ranks(snapshot),
            "curves": self._curves.news(self.read_metrics()),
            "pictures": self._pictures.news(),
            "lanes": self._lanes.news(snapshot.phases),
            "usage": self._usage.news(snapshot.usage),
            "logs": self._logs.news(snapshot.num_processes),
            "errors": self._errors.news(error_items(snapshot)),
            "notices": self._notices.news(),
            "settings": self._settings.news(setting_items(snapshot)),
            "changes": self._changes.news(change_items(snapshot)),
            "answers": self._answers.news(),
            "findings": self._findings.news(),
        }
        if snapshot.seconds - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = snapshot.seconds
        message = {key: value for key, value in news.items() if value}
        return {"type": "update", **message} if message else None

    def read_metrics(self) -> Mapping[tuple[str, int], list[Point]]:
        """Add new metrics to `curves`. Return the new points of each curve, by name and rank."""
        points, self._position = self._reader.metrics_since(self._position)
        return self._curves.fold(points)

    def _run_item(self, snapshot: RunSnapshot) -> Message:
        return run_item(snapshot, can_act=self.can_act, action_hint=self.action_hint)

    def _new_run(self, snapshot: RunSnapshot) -> Message | None:
        item = self._run_item(snapshot)
        if not self._is_due(snapshot) and _calm(item) == _calm(self._run):
            return None
        if item == self._run:
            return None
        self._run = item
        return item

    def _new_ranks(self, snapshot: RunSnapshot) -> list[Message]:
        is_due, changed = self._is_due(snapshot), []
        for rank, item in _rank_items(snapshot).items():
            known = self._ranks.get(rank)
            calm = item if is_due or known is None else {**item, **{key: known[key] for key in VOLATILE}}
            if calm != known:
                self._ranks[rank] = item
                changed.append(item)
        return changed

    def _is_due(self, snapshot: RunSnapshot) -> bool:
        return snapshot.is_over or snapshot.seconds - self._refreshed >= REFRESH_SECONDS


def _calm(item: Message) -> Message:
    """Return a run's item without the values that change with time alone."""
    return {**item, "seconds": 0, "waiting": bool(item.get("waiting"))}


def _rank_items(snapshot: RunSnapshot) -> dict[int, Message]:
    return {item["rank"]: item for item in rank_items(snapshot)}
