"""Messages of a monitor to its page: the whole run at first, then only new data.

Plain data in, plain data out: no widget, no thread, no clock. A message stays small whatever the run does: about
100 kB, the first one at most some MB. A flood of points is thinned, and of a long log the page gets the end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.legend import LIMITS, legend_item
from notebook_launcher.drawing.run_picture import change_marks
from notebook_launcher.history.summaries import TimeLeft
from notebook_launcher.widgets.monitor.feeds import LaneFeed, LogFeed, ReportedPictureFeed
from notebook_launcher.widgets.monitor.page_items import change_items, errors_item, rank_items, run_item, setting_items
from notebook_launcher.widgets.monitor.plot_feed import ALL_POINTS, MAX_FILE, NEW_POINTS, PlotFeed, UsageFeed, csv_of
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
        self._logs = LogFeed(reader)
        self._pictures = ReportedPictureFeed(reader)
        self._lanes = LaneFeed()
        self._usage = UsageFeed()
        self._left = TimeLeft()
        self._position = 0
        """Position in the run's metrics up to which they were read."""
        self._news: defaultdict[str, list[Any]] = defaultdict(list)
        """By kind: items for the next message that are not read from the run."""
        self._notices: deque[str] = deque(maxlen=LIMITS.notices)
        self._findings: dict[str, Message] = {}
        """The newest notices, and the last finding of each kind, for a page that is reloaded."""
        self._num_changes = 0
        """Changes of settings that were sent."""
        self._num_told = 0
        """Texts that ranks sent for the user which have become notices."""
        self._run: Message = {}
        self._ranks: dict[int, Message] = {}
        self._settings: list[Message] = []
        self._plotting: Message = {}
        self._errors: Message = {}
        """The items that were sent last."""
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
        self._news["zoomed"] += [item] if item else []

    def offer_csv(self, page: str) -> None:
        """Add all values that ranks reported, as a file for one page, to the next message."""
        name = f"{self._reader.snapshot().id or 'run'}.csv"
        text = csv_of({"": self._reader.metrics_since(0)[0]})
        if len(text) > MAX_FILE:
            self.notice(f"{name} is too large for the page: run.metrics.to_pandas().to_csv({name!r}) writes it")
        else:
            self._news["files"].append({"page": page, "name": name, "text": text})

    def notice(self, text: str) -> None:
        """Add a line for the user to the next message."""
        self._notices.append(text)
        self._news["notices"] = [*self._news["notices"], text][-LIMITS.notices :]

    def answer(self, name: str, problem: str) -> None:
        """Answer the page's request to change a setting: the reason why it cannot be; empty: it was passed on."""
        self._news["answers"].append({"name": name, "problem": problem})

    def finding(self, item: Message) -> None:
        """Add an item FINDING to the next message; the last one of each kind is kept for a page that is reloaded."""
        self._findings[item["kind"]] = item
        self._news["findings"].append(item)

    def reset(self) -> Message:
        """Return a message with the whole run."""
        snapshot = self._read()
        self._news.clear()
        self._num_changes = 0
        self._run, self._ranks = self._run_item(snapshot), {item["rank"]: item for item in rank_items(snapshot)}
        self._settings, self._refreshed = setting_items(snapshot), snapshot.seconds
        plots = self._plots.everything()
        self._plotting, self._errors = self._plotting_item(snapshot), errors_item(snapshot)
        return {
            "type": "reset",
            "legend": legend_item(),
            "run": self._run,
            "ranks": list(self._ranks.values()),
            "plots": plots,
            "plotting": self._plotting,
            "pictures": self._pictures.everything(),
            "lanes": self._lanes.everything(snapshot.phases),
            "usage": self._usage.everything(snapshot.usage),
            "logs": self._logs.tails(snapshot.num_processes),
            "errors": self._errors,
            "notices": list(self._notices),
            "settings": self._settings,
            "changes": self._new_changes(snapshot),
            "answers": [],
            "findings": list(self._findings.values()),
        }

    def update(self, *, is_last: bool = False) -> Message | None:
        """Return a message with the data that is new since the last one; None if there is none.

        Args:
            is_last: True if no other one follows soon, so that nothing may be left for it.
        """
        snapshot = self._read()
        is_due = snapshot.is_over or snapshot.seconds - self._refreshed >= REFRESH_SECONDS
        run, ranks = self._run_item(snapshot), rank_items(snapshot)
        news: Message = {
            "run": run if run != self._run and (is_due or _calm_run(run) != _calm_run(self._run)) else None,
            "ranks": [item for item in ranks if self._is_new(item, self._ranks.get(item["rank"]), is_due)],
            "plots": self._plots.news(ALL_POINTS if is_last else NEW_POINTS),
            "plotting": self._plotting_item(snapshot),
            "pictures": self._pictures.news(),
            "lanes": self._lanes.news(snapshot.phases),
            "usage": self._usage.news(snapshot.usage),
            "logs": self._logs.news(snapshot.num_processes),
            "errors": errors_item(snapshot),
            "settings": setting_items(snapshot),
            "changes": self._new_changes(snapshot),
            **self._news,
        }
        self._news.clear()
        news |= {name: None for name in ("plotting", "settings", "errors") if news[name] == getattr(self, f"_{name}")}
        self._run, self._settings = news["run"] or self._run, news["settings"] or self._settings
        self._plotting, self._errors = news["plotting"] or self._plotting, news["errors"] or self._errors
        self._ranks |= {item["rank"]: item for item in news["ranks"]}
        if is_due:
            self._refreshed = snapshot.seconds
        message = {key: value for key, value in news.items() if value}
        return {"type": "update", **message} if message else None

    def read_metrics(self) -> None:
        """Add new metrics to `curves`."""
        points, self._position = self._reader.metrics_since(self._position)
        self._plots.fold(points)

    def _read(self) -> RunSnapshot:
        """Read what is new of the run."""
        snapshot = self._reader.snapshot()
        for text in snapshot.notices[self._num_told :]:
            self.notice(one_line(text, 400))
        self._num_told = len(snapshot.notices)
        self.read_metrics()
        return snapshot

    def _new_changes(self, snapshot: RunSnapshot) -> list[Message]:
        """Return the changes of settings since the last message."""
        items = change_items(snapshot)
        new, self._num_changes = items[self._num_changes :], len(items)
        return new

    def _plotting_item(self, snapshot: RunSnapshot) -> Message:
        return self._plots.plotting(change_marks(snapshot, self.curves, self._plots.options.axis), self._turn)

    def _run_item(self, snapshot: RunSnapshot) -> Message:
        left = self._left.read(snapshot)
        return {
            **run_item(snapshot, can_act=self.can_act, action_hint=self.action_hint),
            "left": "" if left is None else format_left(left),
            "outlives": self._outlives,
            "lost_hint": f'The kernel restarted or ended; the run continues: attach("{snapshot.id}") shows it again.'
            if self._outlives
            else "The kernel restarted or ended. The run has ended too. Last update shown."
            f' open_run("{snapshot.id}") shows what its folder holds.',
        }

    @staticmethod
    def _is_new(item: Message, known: Message | None, is_due: bool) -> bool:
        return item != known and (is_due or known is None or _calm_rank(item) != _calm_rank(known))


def _calm_run(item: Message) -> Message:
    """Return a run's item without the values that change with time alone."""
    return {**item, "seconds": 0, "left": "", "waiting": bool(item.get("waiting"))}


def _calm_rank(item: Message) -> Message:
    """Return a rank's item without the values that change all the time."""
    return {**item, "words": {**item["words"], **dict.fromkeys(VOLATILE)}}
