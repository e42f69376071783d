"""Messages of a monitor to its page: the whole run at first, then only new data.

Plain data in, plain data out: no widget, no thread, no clock. A message stays small whatever the run does: about
100 kB, the first one at most some MB. A flood of points is thinned, and of a long log the page gets the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.legend import legend_item
from notebook_launcher.drawing.run_picture import change_marks
from notebook_launcher.history.summaries import TimeLeft
from notebook_launcher.widgets.monitor.feeds import LaneFeed, LogFeed
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
from notebook_launcher.widgets.monitor.plot_feed import ALL_POINTS, MAX_FILE, NEW_POINTS, PlotFeed, UsageFeed, csv_of
from notebook_launcher.widgets.monitor.reported_picture_feed import ReportedPictureFeed
from notebook_launcher.wording import format_left, one_line

if TYPE_CHECKING:
    from notebook_launcher.drawing.plots import PlotOptions
    from notebook_launcher.history.curves import Curves
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
        outlives: True if the run goes on without this kernel.
    """

    def __init__(self, reader: RunReader, *, can_act: bool = False, outlives: bool = False) -> None:
        self.can_act = can_act
        self._outlives = outlives
        self.action_hint = ""
        """Text beside the buttons, if they do not work at once."""
        self._reader = reader
        self._plots = PlotFeed()
        self._turn = 0
        """Number of the page's last request to draw otherwise, by which the page knows the answer."""
        self._plotting: Message = {}
        """The item PLOTTING that was sent last."""
        self._zoomed: list[Message] = []
        self._files: list[Message] = []
        """Items ZOOMED and FILE for the next message."""
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
        self._told = GrowingFeed[str]()
        """What ranks sent for the user, of which the feed of notices has all that this one has."""
        self._answers = AnswerFeed()
        self._findings = FindingFeed()
        self._left = TimeLeft()
        self._run: Message = {}
        """The item RUN that was sent last."""
        self._ranks: dict[int, Message] = {}
        """By rank: the item RANK that was sent last."""
        self._refreshed = 0.0
        """The run's age in seconds when values that change all the time were sent last."""

    @property
    def curves(self) -> Curves:
        """Curves of the metrics that have been read so far."""
        return self._plots.curves

    def draw(self, options: PlotOptions, turn: int) -> None:
        """Draw the curves otherwise from now on."""
        self._plots.draw(options)
        self._turn = turn

    def zoom(self, key: str, low: float, high: float) -> None:
        """Add a part of a plot, as fine as the ranks reported it, to the next message."""
        item = self._plots.zoom(self._reader.metrics_since(0)[0], key, low, high)
        self._zoomed += [item] if item else []

    def offer_csv(self, page: str) -> None:
        """Add all values that ranks reported, as a file for one page, to the next message."""
        name = f"{self._reader.snapshot().id or 'run'}.csv"
        text = csv_of({"": self._reader.metrics_since(0)[0]})
        if len(text) > MAX_FILE:
            self.notice(f"{name} is too large for the page: run.metrics.to_pandas().to_csv({name!r}) writes it")
        else:
            self._files.append({"page": page, "name": name, "text": text})

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
        self._read_notices(snapshot)
        self.read_metrics()
        self._zoomed, self._files = [], []
        self._run, self._ranks = self._run_item(snapshot), _rank_items(snapshot)
        self._refreshed = snapshot.seconds
        return {
            "type": "reset",
            "legend": legend_item(),
            "run": self._run,
            "ranks": list(self._ranks.values()),
            "plots": self._plots.everything(),
            "plotting": self._plotting_item(snapshot),
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

    def update(self, *, is_last: bool = False) -> Message | None:
        """Return a message with the data that is new since the last one; None if there is none.

        Args:
            is_last: True if no other one follows soon, so that nothing may be left for it.
        """
        snapshot = self._reader.snapshot()
        self._read_notices(snapshot)
        self.read_metrics()
        news: Message = {
            "run": self._new_run(snapshot),
            "ranks": self._new_ranks(snapshot),
            "plots": self._plots.news(ALL_POINTS if is_last else NEW_POINTS),
            "plotting": self._new_plotting(snapshot),
            "zoomed": self._zoomed,
            "files": self._files,
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
        self._zoomed, self._files = [], []
        message = {key: value for key, value in news.items() if value}
        return {"type": "update", **message} if message else None

    def read_metrics(self) -> None:
        """Add new metrics to `curves`."""
        points, self._position = self._reader.metrics_since(self._position)
        self._plots.fold(points)

    def _read_notices(self, snapshot: RunSnapshot) -> None:
        for text in self._told.news(snapshot.notices):
            self._notices.add(one_line(text, 400))

    def _plotting_item(self, snapshot: RunSnapshot) -> Message:
        marks = change_marks(snapshot, self.curves, self._plots.options.axis)
        self._plotting = self._plots.plotting(marks, self._turn)
        return self._plotting

    def _new_plotting(self, snapshot: RunSnapshot) -> Message | None:
        known = self._plotting
        item = self._plotting_item(snapshot)
        return None if item == known else item

    def _run_item(self, snapshot: RunSnapshot) -> Message:
        item = run_item(snapshot, can_act=self.can_act, action_hint=self.action_hint)
        left = self._left.read(snapshot)
        return {
            **item,
            "left": "" if left is None else format_left(left),
            "back": f'attach("{snapshot.id}")' if self._outlives and not snapshot.is_over else "",
        }

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
            calm = item if is_due or known is None else {**item, **_volatile(item, known)}
            if calm != known:
                self._ranks[rank] = item
                changed.append(item)
        return changed

    def _is_due(self, snapshot: RunSnapshot) -> bool:
        return snapshot.is_over or snapshot.seconds - self._refreshed >= REFRESH_SECONDS


def _calm(item: Message) -> Message:
    """Return a run's item without the values that change with time alone."""
    return {**item, "seconds": 0, "left": "", "waiting": bool(item.get("waiting"))}


def _volatile(item: Message, known: Message) -> Message:
    """Return the values of a rank that change all the time as they were sent last."""
    old = {key: known[key] for key in VOLATILE}
    return {**old, "words": {**item["words"], **{key: known["words"][key] for key in VOLATILE}}}


def _rank_items(snapshot: RunSnapshot) -> dict[int, Message]:
    return {item["rank"]: item for item in rank_items(snapshot)}
