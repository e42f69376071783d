"""Messages of a monitor to its page: the whole run at first, then only new data.

Plain data in, plain data out: no widget, no thread, no clock. A message stays small whatever the run does: about
100 kB, the first one at most some MB. A flood of points is thinned, and of a long log the page gets the end. In its
items, which `static/monitor/wire.d.ts` lists, a number that is not finite is null.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher import wording
from notebook_launcher.drawing.legend import LIMITS, legend_item
from notebook_launcher.drawing.reported import TABLE, read_rows, without_formulas
from notebook_launcher.drawing.run_picture import alike, because, call_text, change_marks, failures_to_show, outputs_of
from notebook_launcher.history.summaries import TimeLeft, measure_sync, merge_progress, slowest_rank
from notebook_launcher.widgets.monitor.plot_feed import ALL_POINTS, MAX_FILE, NEW_POINTS, PlotFeed, UsageFeed, csv_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from notebook_launcher.drawing.plots import PlotOptions
    from notebook_launcher.history import schema
    from notebook_launcher.history.curves import Curves
    from notebook_launcher.history.summaries import MergedProgress
    from notebook_launcher.kernel.inspection.profiles import Profile
    from notebook_launcher.kernel.inspection.stacks import Samples

Item = dict[str, Any]

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

    def __init__(self, reader: schema.RunReader, *, can_act: bool = False, outlives: bool = False) -> None:
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
        self._findings: dict[str, Item] = {}
        """The newest notices, and the last finding of each kind, for a page that is reloaded."""
        self._num_changes = 0
        """Changes of settings that were sent."""
        self._num_told = 0
        """Texts that ranks sent for the user which have become notices."""
        self._ranks: dict[int, Item] = {}
        self._sent: dict[str, Any] = {}
        """The items that were sent last, of ranks by rank."""
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

    def finding(self, item: Item) -> None:
        """Add an item FINDING to the next message; the last one of each kind is kept for a page that is reloaded."""
        self._findings[item["kind"]] = item
        self._news["findings"].append(item)

    def reset(self) -> Item:
        """Return a message with the whole run."""
        snapshot = self._read()
        self._news.clear()
        self._num_changes = 0
        plots = self._plots.everything()
        self._ranks, self._refreshed = {item["rank"]: item for item in rank_items(snapshot)}, snapshot.seconds
        self._sent = self._items(snapshot)
        return {
            "type": "reset",
            "legend": legend_item(),
            **self._sent,
            "ranks": list(self._ranks.values()),
            "plots": plots,
            "pictures": self._pictures.everything(),
            "lanes": self._lanes.everything(snapshot.phases),
            "usage": self._usage.everything(snapshot.usage),
            "logs": self._logs.tails(snapshot.num_processes),
            "notices": list(self._notices),
            "changes": self._new_changes(snapshot),
            "answers": [],
            "findings": list(self._findings.values()),
        }

    def update(self, *, is_last: bool = False) -> Item | None:
        """Return a message with the data that is new since the last one; None if there is none.

        Args:
            is_last: True if no other one follows soon, so that nothing may be left for it.
        """
        snapshot = self._read()
        is_due = snapshot.is_over or snapshot.seconds - self._refreshed >= REFRESH_SECONDS
        plots = self._plots.news(ALL_POINTS if is_last else NEW_POINTS)
        items = {name: item for name, item in self._items(snapshot).items() if item != self._sent.get(name)}
        if "run" in items and not is_due and _calm_run(items["run"]) == _calm_run(self._sent.get("run", {})):
            del items["run"]
        ranks = [
            item
            for item in rank_items(snapshot)
            if item != (known := self._ranks.get(item["rank"]))
            and (is_due or known is None or _calm_rank(item) != _calm_rank(known))
        ]
        news: Item = {
            **items,
            "ranks": ranks,
            "plots": plots,
            "pictures": self._pictures.news(),
            "lanes": self._lanes.news(snapshot.phases),
            "usage": self._usage.news(snapshot.usage),
            "logs": self._logs.news(snapshot.num_processes),
            "changes": self._new_changes(snapshot),
            **self._news,
        }
        self._news.clear()
        self._sent |= items
        self._ranks |= {item["rank"]: item for item in ranks}
        if is_due:
            self._refreshed = snapshot.seconds
        message = {key: value for key, value in news.items() if value}
        return {"type": "update", **message} if message else None

    def _items(self, snapshot: schema.RunSnapshot) -> dict[str, Any]:
        """Return what is sent whole when it has changed."""
        marks = change_marks(snapshot, self.curves, self._plots.options.axis)
        return {
            "run": self._run_item(snapshot),
            "plotting": self._plots.plotting(marks, self._turn),
            "errors": errors_item(snapshot),
            "settings": setting_items(snapshot),
        }

    def read_metrics(self) -> None:
        """Add new metrics to `curves`."""
        points, self._position = self._reader.metrics_since(self._position)
        self._plots.fold(points)

    def _read(self) -> schema.RunSnapshot:
        """Read what is new of the run."""
        snapshot = self._reader.snapshot()
        for text in snapshot.notices[self._num_told :]:
            self.notice(wording.one_line(text, 400))
        self._num_told = len(snapshot.notices)
        self.read_metrics()
        return snapshot

    def _new_changes(self, snapshot: schema.RunSnapshot) -> list[Item]:
        """Return the changes of settings since the last message."""
        items = change_items(snapshot)
        new, self._num_changes = items[self._num_changes :], len(items)
        return new

    def _run_item(self, snapshot: schema.RunSnapshot) -> Item:
        left = self._left.read(snapshot)
        return {
            **run_item(snapshot, can_act=self.can_act, action_hint=self.action_hint),
            "left": "" if left is None else wording.format_left(left),
            "outlives": self._outlives,
            "lost_hint": f'The kernel restarted or ended; the run continues: attach("{snapshot.id}") shows it again.'
            if self._outlives
            else "The kernel restarted or ended. The run has ended too. Last update shown."
            f' open_run("{snapshot.id}") shows what its folder holds.',
        }


def _calm_run(item: Item) -> Item:
    """Return a run's item without the values that change with time alone."""
    return {**item, "seconds": 0, "left": "", "waiting": bool(item.get("waiting"))}


def _calm_rank(item: Item) -> Item:
    """Return a rank's item without the values that change all the time."""
    return {**item, "words": {**item["words"], **dict.fromkeys(VOLATILE)}}


# --------------------------------------------------------------------------------------------------------------------
# Items of the run, its ranks, errors, settings and measurements.


NOBODY_CHANGES = "Needs an Accelerator that has made an update"
MAX_SETTINGS = 64
MAX_TEXT = 2000
MAX_DRAWING = 1_500_000
"""Characters of a drawing that is sent to the page: Jupyter's server drops what comes above 3 MB in 3 s."""
MAX_TRACES = 1_000_000
"""Bytes of the traces of a profile that are sent to the page; larger ones are in the run's folder."""
MAX_TRACEBACK, MAX_TRACEBACKS = 20_000, 500_000
"""Characters of a traceback, and of all of them: each message with a new error has all errors."""
_NUMBER, _ABOVE_0 = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", r"(?=[\d.]*[1-9])(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
_FACTOR = r"[x*]\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
FIELDS: dict[str, tuple[str, str, str]] = {
    "positive": (f"{_ABOVE_0}|{_FACTOR}", "A number above 0, a factor such as x0.5", "0.01 or x0.5"),
    "optional": (f"none|{_ABOVE_0}|{_FACTOR}", "A number above 0, a factor such as x0.5, or none", "1.0, x0.5 or none"),
    "count": (r"0*[1-9]\d*", "A whole number, 1 or more", ""),
    "number": (f"{_NUMBER}|{_FACTOR}", "A number, or a factor such as x0.5", "0.5 or x0.5"),
    "integer": (rf"[+-]?\d+|{_FACTOR}", "A whole number, or x2", "4 or x2"),
    "switch": ("on|off", "on or off", "on or off"),
}
"""By the kind of a setting: what the page sends of what was typed into its field (the kernel checks it again), as a
regular expression and in words, and an example; empty: its present value."""


def run_item(snapshot: schema.RunSnapshot, *, can_act: bool, action_hint: str) -> Item:
    """Return the item RUN."""
    merged = merge_progress(snapshot.ranks)
    is_live = can_act and not snapshot.is_over
    # An Accelerator that has made an update reports its settings.
    can_change = is_live and snapshot.state in ("running", "waiting", "paused") and bool(snapshot.settings)
    return {
        "id": snapshot.id,
        "name": snapshot.name,
        "state": snapshot.state,
        "summary": snapshot.summary,
        "arguments": call_text(snapshot),
        "seconds": round(snapshot.seconds, 6),
        "num_processes": snapshot.num_processes,
        "is_over": snapshot.is_over,
        "error": _short(snapshot.error),
        "waiting": _short(snapshot.waiting),
        "effective_batch": effective_batch(snapshot),
        "progress": None if merged is None else _progress_item(merged),
        "actions": {
            "stop": is_live and snapshot.state != "stopping",
            "interrupt": is_live,
            "stacks": is_live,
            # Only an Accelerator saves, and an Accelerator that trains has reported windows.
            "save": is_live and snapshot.state in ("running", "waiting", "paused") and bool(snapshot.phases),
            "pause": can_change and snapshot.state != "paused",
            "resume": can_change and snapshot.state == "paused",
            "set": can_change,
            "sample": is_live and snapshot.state in ("running", "waiting"),
            "profile": can_change and snapshot.state == "running",
        },
        "change_hint": "" if can_change or not is_live else NOBODY_CHANGES,
        "action_hint": action_hint if is_live else "The kernel ended before the run did." * (snapshot.state == "lost"),
        "sync": measure_sync(snapshot.phases.values()).text,
    }


def _progress_item(merged: MergedProgress) -> Item:
    left = (
        "" if merged.seconds_left is None else f"{wording.format_seconds(math.ceil(merged.seconds_left))} {merged.left}"
    )
    return {
        "done": merged.done,
        "total": merged.total,
        "text": " · ".join(filter(None, [_short(merged.description), done_words(merged.done, merged.total)])),
        "pace": " · ".join(filter(None, [wording.format_rate(merged.rate), left])),
    }


def done_words(done: int | None, total: int | None) -> str:
    """Return `25 of 100 (25 %)`, or `25 done` where the total is unknown."""
    count = wording.format_count(done or 0)
    return (
        f"{count} of {wording.format_count(total)} ({wording.format_share(min(1.0, (done or 0) / total))})"
        if total
        else f"{count} done"
    )


def rank_items(snapshot: schema.RunSnapshot) -> list[Item]:
    """Return the items RANK."""
    # None waits for another while all are held.
    slowest = None if snapshot.state == "paused" else slowest_rank(snapshot)
    return [rank_item(rank, is_slowest=rank.rank == slowest) for rank in snapshot.ranks]


def rank_item(rank: schema.RankSnapshot, *, is_slowest: bool) -> Item:
    """Return the item RANK, with numbers in the words that the page shows."""
    return {
        "words": {
            "step": wording.format_count(rank.step),
            "samples_per_second": wording.format_number(rank.samples_per_second, 3),
            "memory": wording.format_bytes(rank.peak_memory if rank.memory is None else rank.memory),
            "gpu_memory": wording.format_bytes(rank.gpu_memory),
            "gpu_utilization": wording.format_share(rank.gpu_utilization),
            "done": done_words(rank.done, rank.total),
        },
        "rank": rank.rank,
        "state": rank.state,
        # "stopped" needs no reason if the user asked for it, but if another rank was the cause.
        "reason": "" if rank.state == "stopped" and not rank.reason.startswith("caused by ") else _short(rank.reason),
        "last_line": f"returned {_short(rank.returned)}" if rank.returned else _short(rank.last_line),
        "done": rank.done,
        "total": rank.total,
        "slowest": is_slowest,
    }


def errors_item(snapshot: schema.RunSnapshot) -> Item:
    """Return the item ERRORS."""
    failures = failures_to_show(snapshot)
    groups = alike(failures)
    limit = min(MAX_TRACEBACK, MAX_TRACEBACKS // max(1, len(groups)))
    victims = [failure for failure in failures if failure.victim]
    cause = because(victims[0], failures) if victims else ""
    return {
        "culprits": [_error_item(group, limit) for group in groups if not group[0].victim],
        "victims": [_error_item(group, limit) for group in groups if group[0].victim],
        "victims_title": f"{wording.plural(len(victims), 'rank')} failed as a consequence{cause}",
    }


def _error_item(group: Sequence[schema.RankFailure], limit: int) -> Item:
    trace, who = group[0].traceback, wording.rank_list(failure.rank for failure in group)
    return {
        "who": who,
        "summary": _short(group[0].summary),
        # The end has the exception and its place.
        "traceback": trace if len(trace) <= limit else "[...]\n" + trace[-limit:],
        "outputs": [
            ["Last lines of output" + f" of {ranks}" * (ranks != who), "\n".join(map(_short, lines))]
            for ranks, lines in outputs_of(group).items()
        ],
    }


def setting_items(snapshot: schema.RunSnapshot) -> list[Item]:
    """Return the items SETTING."""
    return [
        setting_item(wording.one_line(setting.name, 80), wording.format_setting(setting.value), setting.kind)
        for setting in snapshot.settings[:MAX_SETTINGS]
    ]


def setting_item(name: str, text: str, kind: str) -> Item:
    """Return the item SETTING."""
    pattern, takes, example = FIELDS[kind]
    return {"name": name, "text": text, "kind": kind, "pattern": pattern, "takes": takes, "example": example or text}


def change_items(snapshot: schema.RunSnapshot) -> list[Item]:
    """Return the items CHANGE."""
    return [
        {
            "name": (name := wording.one_line(change.name, 80)),
            "words": f"{name} {wording.format_setting(change.before)} → {wording.format_setting(change.after)}",
            "who": f"by {'the monitor' if change.source == 'monitor' else 'code'} after update {change.update}",
        }
        for change in snapshot.changes
    ]


def sample_item(samples: Samples) -> Item:
    """Return the item FINDING of sampled stacks."""
    drawing = samples.to_svg()
    note = "" if len(drawing) <= MAX_DRAWING else "The drawing is too large for the page; run.sample() has it."
    return {"kind": "sample", "drawing": "" if note else drawing, "tables": [], "problem": note}


def profile_item(profile: Profile) -> Item:
    """Return the item FINDING of a profile: a table for each rank, with its trace if there is room for it."""
    tables, room = profile.plain_tables(), MAX_TRACES
    for table in tables:
        table["trace_data"] = ""
        with contextlib.suppress(OSError):  # There is no trace, or it was removed.
            path = Path(table["trace"])
            if path.is_file() and path.stat().st_size <= room:
                room -= path.stat().st_size
                table["trace_data"] = base64.b64encode(path.read_bytes()).decode()
    return {"kind": "profile", "drawing": "", "tables": tables, "problem": ""}


def effective_batch(snapshot: schema.RunSnapshot) -> str:
    """Return `8 x 4 x 2 = 64 samples per update`, as the ranks have counted so far; empty if no rank has.

    The figures describe a full window, because the last window of an epoch is usually cut short. If most windows
    are not full, because their micro-batches vary, the figures are averages.
    """
    known = next((phases for _, phases in sorted(snapshot.phases.items()) if phases.windows and phases.samples), None)
    if known is None or not math.isfinite(known.samples):
        return ""
    varies = 2 * known.num_fullest < known.windows
    means = known.micro_batches / known.windows, known.samples / known.windows
    per_window, samples = means if varies else known.fullest
    each = samples / per_window / snapshot.num_processes
    # Without a prepared loader that counts samples, a micro-batch counts as 1.
    factors, unit = ([each], "samples") if each != 1 else ([], "micro-batches")
    product = " x ".join(_count(factor) for factor in [*factors, per_window, snapshot.num_processes])
    return f"{product} = {_count(samples)} {unit} per update{' on average' * varies}"


def _count(value: float) -> str:
    return wording.format_count(value) if value >= 100 or float(value).is_integer() else wording.format_number(value, 3)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " [...]"


# --------------------------------------------------------------------------------------------------------------------
# Timelines, logs and pictures, each of bounded size.


ALL_SPANS, NEW_SPANS = 16_384, 2000
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

    def everything(self, phases: Mapping[int, schema.RankPhases]) -> list[Item]:
        """Return the newest spans of each rank."""
        self._sent_to.clear()
        return self._lanes(phases, min(LIMITS.spans, ALL_SPANS // max(1, len(phases))))

    def news(self, phases: Mapping[int, schema.RankPhases]) -> list[Item]:
        """Return the spans that began since the last message; of a flood, the newest."""
        return self._lanes(phases, NEW_SPANS // max(1, len(phases)))

    def _lanes(self, phases: Mapping[int, schema.RankPhases], limit: int) -> list[Item]:
        lanes = [{"rank": rank, "spans": self._take(rank, phases[rank].spans, limit)} for rank in sorted(phases)]
        return [lane for lane in lanes if lane["spans"]]

    def _take(self, rank: int, spans: Sequence[schema.PhaseSpan], limit: int) -> list[list[Any]]:
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

    def __init__(self, reader: schema.RunReader) -> None:
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
        left_out = f"\n[... {wording.format_bytes(start - begin)} not shown; run.logs({rank}) has everything ...]\n"
        return left_out + text.partition("\n")[2]

    def _end(self, rank: int) -> int:
        return self._reader.logs_since(rank, FAR)[1]


class ReportedPictureFeed:
    """Images, histograms and tables of a run as items PICTURE."""

    def __init__(self, reader: schema.RunReader) -> None:
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


def _picture_items(pictures: Sequence[schema.RunPicture], room: int) -> list[Item]:
    counts: defaultdict[tuple[str, int], int] = defaultdict(int)
    kept = []
    for picture in reversed(pictures):
        key = (picture.name, picture.rank)
        room -= len(picture.data)
        if counts[key] == 0 or (room >= 0 and counts[key] < LIMITS.pictures):
            counts[key] += 1
            kept.append(picture)
    return [_picture_item(picture) for picture in reversed(kept)]


def _picture_item(picture: schema.RunPicture) -> Item:
    is_table = picture.mime == TABLE
    data = without_formulas(picture.data) if is_table else picture.data
    return {
        "name": picture.name,
        "rank": picture.rank,
        "step": picture.step,
        "rows": read_rows(picture, MAX_ROWS) if is_table else [],
        "source": f"data:{picture.mime};base64,{base64.b64encode(data).decode()}",
    }
