"""The monitor's page in a browser tab, with a fake model, and messages as Python sends them.

Tests give curves, of which the kernel's own code makes the plots; it answers the page's requests about them, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from notebook_launcher.drawing.legend import legend_item
from notebook_launcher.drawing.plots import PlotOptions
from notebook_launcher.history.schema import MetricPoint, RankFailure, RankSnapshot, RunSnapshot
from notebook_launcher.widgets.assets import STATIC, join_modules, monitor_css
from notebook_launcher.widgets.monitor.feed import errors_item, rank_item
from notebook_launcher.widgets.monitor.plot_feed import PlotFeed, csv_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Locator, Page

SCRIPT = join_modules(STATIC / "monitor/main.js")
STYLE = monitor_css()
ACTIONS = ("stop", "interrupt", "stacks", "save", "pause")
PLOT = ".nbl-plot-canvas canvas"
TIMELINE = "[aria-label^='Timeline of']"
EVIL = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>\"'&amp;"

# Stands in for a front end of any widget, and counts what its script (loaded from a blob) starts and has to end.
HARNESS = """
<!doctype html><meta charset="utf-8"><style>%(css)s</style><style>body { margin: 0 }</style>
<script>
const isOurs = () => new Error().stack.includes("blob:"); // playwright observes and waits as well
window.running = { interval: new Set(), frame: new Set(), observer: new Set() };
const count = (kind, start, end) => {
  const [begin, stop] = [window[start].bind(window), window[end].bind(window)];
  window[start] = (call, ...rest) => {
    const id = begin((...all) => { if (kind === "frame") running[kind].delete(id); call(...all); }, ...rest);
    if (isOurs()) running[kind].add(id);
    return id;
  };
  window[end] = (id) => { running[kind].delete(id); stop(id); };
};
count("interval", "setInterval", "clearInterval");
count("frame", "requestAnimationFrame", "cancelAnimationFrame");
for (const name of ["IntersectionObserver", "ResizeObserver", "MutationObserver"]) {
  window[name] = class extends window[name] {
    observe(...all) { if (isOurs()) running.observer.add(this); super.observe(...all); }
    disconnect() { running.observer.delete(this); super.disconnect(); }
  };
}
window.makeModel = () => {
  const calls = new Map();
  return {
    sent: [], calls, traits: %(traits)s,
    get(name) { return this.traits[name]; }, set() {}, save_changes() {},
    change(name, value) { this.traits[name] = value; this.fire(`change:${name}`); },
    on(name, call) { calls.set(name, [...(calls.get(name) ?? []), call]); },
    off(name, call) { calls.set(name, (calls.get(name) ?? []).filter((one) => one !== call)); },
    send(message) { if (this.isDead) throw new Error("comm is closed"); this.sent.push(message); },
    fire(name, ...all) { for (const call of calls.get(name) ?? []) call(...all); },
  };
};
</script>
<script type="module">
const url = URL.createObjectURL(new Blob([%(module)s], { type: "text/javascript" }));
window.widget = (await import(url)).default;
URL.revokeObjectURL(url);
window.model = makeModel();
window.cleanups = [];
window.mount = () => { // as JupyterLab does: first created, then added to the page
  const el = document.createElement("div");
  cleanups.push(widget.render({ model, el }));
  document.body.append(el);
};
mount();
</script>
"""

LISTENERS = "[...model.calls.values()].flat().length"
SETTLE = "async () => { for (let at = 0; at < 4; at += 1) await new Promise(requestAnimationFrame); }"

COLUMNS = """(canvas, [color, top, bottom]) => {
    const height = Math.min(bottom, canvas.height) - top;
    const { data } = canvas.getContext("2d").getImageData(0, top, canvas.width, height);
    const wanted = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    const found = new Set();
    for (let at = 0; at < data.length; at += 4) {
        const isIt = wanted.every((value, more) => Math.abs(data[at + more] - value) < 8);
        if (isIt && data[at + 3] > 60) found.add((at / 4) % canvas.width);
    }
    return [...found];
}"""

LEFT = f"""() => [
    running.interval.size, running.frame.size, running.observer.size,
    {LISTENERS}, document.querySelectorAll(".nbl-monitor").length,
]"""


class Tab:
    """A browser tab with the monitor in it."""

    def __init__(self, page: Page, part: str = "") -> None:
        self.page = page
        self.part = part
        """Title of the part of the monitor whose tab is selected as soon as it is there."""
        self._plots = PlotFeed()
        self._usage = PlotFeed(PlotOptions(axis="time", grouped=False))
        self._points: list[MetricPoint] = []
        self._marks: list[tuple[int, str]] = []
        self._num_answered = 0
        self._turn = 0

    def deliver(self, message: Any) -> None:
        """Deliver a message to the views and wait until they are drawn."""
        if isinstance(message, dict) and message.get("type") in ("reset", "update"):
            message = self.with_plots(message)
        self._fire(message)
        self.settle()
        if self.part:
            self.open(self.part)

    def open(self, part: str) -> None:
        """Select the tab of a part of the monitor, if there is one, in all views."""
        self.part = part
        select = """part => {
            for (const tab of document.querySelectorAll(".nbl-parts-of-run > .nbl-tabs > [aria-selected=false]"))
                if (tab.textContent === part) tab.click();
        }"""
        self.page.evaluate(select, part)
        self.settle()

    def _fire(self, message: Any) -> None:
        self.page.evaluate("message => model.fire('msg:custom', message, [])", message)

    def with_plots(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the plots of its curves, as the feed makes them."""
        if "plots" in message or any("lines" in item for item in message.get("usage", ())):
            return message  # A feed has made it.
        is_whole = message["type"] == "reset"
        message = dict(message)
        if is_whole:
            self._plots, self._usage = PlotFeed(self._plots.options), PlotFeed(self._usage.options)
            self._points = []
        self._marks = message.pop("marks", [] if is_whole else self._marks)
        points = [point for curve in message.pop("curves", ()) for point in points_of(curve)]
        self._points += points
        self._plots.fold(points)
        self._usage.fold(point for curve in message.pop("usage", ()) for point in points_of(curve))
        for name, feed in (("plots", self._plots), ("usage", self._usage)):
            if is_whole or (items := feed.news()):
                message[name] = feed.everything() if is_whole else items
        if is_whole or "plots" in message or self._marks:
            message.setdefault("plotting", self._plotting())
        return message

    def _plotting(self) -> dict[str, Any]:
        return self._plots.plotting(self._marks, self._turn)

    def settle(self) -> None:
        """Wait until requests are answered, frames drawn, and those requested by elements that came into sight."""
        self.page.evaluate(SETTLE)
        while len(asked := self.page.evaluate("model.sent")) > self._num_answered:
            new, self._num_answered = asked[self._num_answered :], len(asked)
            for message in new:
                if answer := self._answer(message):
                    self._fire({"type": "update", **answer})
                    self.page.evaluate(SETTLE)

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        match asked["type"]:
            case "draw":
                self._turn = asked["turn"]
                names = ("axis", "grouped", "average", "log", "smoothing")
                self._plots.draw(PlotOptions(**{name: asked[name] for name in names}))
                return {"plots": self._plots.news(), "plotting": self._plotting()}
            case "zoom":
                return {"zoomed": [self._plots.zoom(self._points, asked["key"], asked["low"], asked["high"])]}
            case "csv":
                return {
                    "files": [{"page": asked["page"], "name": f"{run()['id']}.csv", "text": csv_of({"": self._points})}]
                }
        return {}

    def sent(self) -> list[str]:
        """Return the types of the messages to Python."""
        return [message["type"] for message in self.page.evaluate("model.sent")]

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def text(self, selector: str) -> str:
        """Return the visible text of the first element that matches."""
        return self.find(selector).first.inner_text()

    def texts(self, selector: str) -> list[str]:
        return self.find(selector).all_inner_texts()

    def width(self, selector: str) -> int:
        """Return the width of a canvas in device pixels."""
        width: int = self.find(selector).first.evaluate("canvas => canvas.width")
        return width

    def columns(self, selector: str, color: str, rows: tuple[int, int] = (0, 10_000)) -> set[int]:
        """Return the pixel columns of a canvas that contain the colour `#rrggbb` between two rows."""
        return set(self.find(selector).first.evaluate(COLUMNS, [color, *rows]))

    def picture(self, selector: str) -> str:
        """Return the content of a canvas as a data URL, for comparison with an earlier or later one."""
        picture: str = self.find(selector).first.evaluate("canvas => canvas.toDataURL()")
        return picture

    def variable(self, name: str) -> str:
        """Return the value of a variable of the style sheet."""
        look = "(root, name) => getComputedStyle(root).getPropertyValue(name).trim()"
        value: str = self.find(".nbl-monitor").first.evaluate(look, name)
        return value


def load(page: Page, css: str, script: str, traits: dict[str, Any]) -> None:
    """Show a widget in a page, with a model of these traits."""
    parts = {"css": css, "module": json.dumps(script), "traits": json.dumps(traits)}
    page.goto("about:blank")
    page.set_content(HARNESS % {name: part.replace("</", "<\\/") for name, part in parts.items()})
    page.wait_for_function("window.cleanups?.length")


@contextlib.contextmanager
def open_tab(page: Page, part: str = "") -> Iterator[Tab]:
    """Show the monitor in a page, and in it a part by its title.

    Fail if the page logs an error, or if anything is left when the views are closed.
    """
    complaints: list[str] = []
    listeners: dict[Any, Any] = {
        "console": lambda message: complaints.append(message.text) if message.type == "error" else None,
        "pageerror": lambda error: complaints.append(str(error)),
    }
    page.set_viewport_size({"width": 1000, "height": 1200})
    page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    for name, listener in listeners.items():
        page.on(name, listener)
    load(page, STYLE, SCRIPT, {"title": "train"})
    yield Tab(page, part)
    page.evaluate("cleanups.forEach((cleanup) => cleanup())")
    left = page.evaluate(LEFT)
    for name, listener in listeners.items():
        page.remove_listener(name, listener)
    assert complaints == []
    assert left == [0, 0, 0, 0, 0], "intervals, frames, observers, subscriptions, elements"


def run(**changes: Any) -> dict[str, Any]:
    """Return an item RUN."""
    record = {
        "id": "20261121-142501-train-3f9c",
        "name": "train",
        "state": "running",
        "summary": "2 processes on cpu",
        "arguments": "lr=0.1, epochs=3",
        "seconds": 61.4,
        "num_processes": 2,
        "is_over": False,
        "error": "",
        "waiting": "",
        "left": "about 12 min left",
        "effective_batch": "8 x 4 x 2 = 64 samples per update",
        "progress": {
            "done": 25,
            "total": 100,
            "text": "epoch 1 · 25 of 100 (25 %)",
            "pace": "12.5 it/s · 6 s left in this epoch",
        },
        "actions": {**dict.fromkeys(ACTIONS, True), "resume": False, "set": True, "sample": True, "profile": True},
        "change_hint": "",
        "action_hint": "",
        "lost_hint": "The kernel ended.",
        "sync": "14 % of a window waits for the network",
    }
    return {**record, **changes}


def rank(number: int, *, slowest: bool = False, **changes: Any) -> dict[str, Any]:
    """Return an item RANK."""
    fields: dict[str, Any] = {
        "state": "running",
        "step": 25,
        "samples_per_second": 800.25,
        "memory": 612_400_000,
        "last_line": f"hello from {number}",
        "done": 25,
        "total": 100,
    }
    return rank_item(RankSnapshot(rank=number, **{**fields, **changes}), is_slowest=slowest)


def errors(*failures: RankFailure) -> dict[str, Any]:
    """Return an item ERRORS."""
    snapshot = RunSnapshot(id="", name="", state="failed", started=0, seconds=0, num_processes=9, summary="", seed=0)
    return errors_item(dataclasses.replace(snapshot, failures=failures))


def points_of(curve: dict[str, Any]) -> Iterator[MetricPoint]:
    """Yield the points of an item CURVE, in which None stands for a value that is not finite."""
    steps, values = curve["steps"], curve["values"]
    for step, value, time in zip(steps, values, curve.get("times", steps), strict=True):
        known = math.nan if value is None else value
        yield MetricPoint(rank=curve["rank"], step=step, time=time, values={curve["name"]: known})


def curve(name: str, number: int = 0, values: Sequence[float | None] = (), **changes: Any) -> dict[str, Any]:
    """Return the points of one rank's metric at the steps 0, 1, 2, ..."""
    steps = list(range(len(values)))
    times = [step / 10 for step in steps]
    return {"name": name, "rank": number, "steps": steps, "values": list(values), "times": times, **changes}


def reset(**changes: Any) -> dict[str, Any]:
    """Return a whole run as a message."""
    empty = ("curves", "pictures", "lanes", "usage", "logs", "notices", "settings", "changes", "answers", "findings")
    message = {"type": "reset", "legend": legend_item(), "run": run(), "ranks": [rank(0), rank(1)], "errors": errors()}
    return {**{name: [] for name in empty}, **message, **changes}


LANES = [
    {
        "rank": number,
        "spans": [
            [phase, window + at / 10, 0.1 + 0.1 * (phase == "backward")]
            for window in range(8)
            for phase, at in [("data", 0), ("forward", 1), ("backward", 2), ("sync", 4), ("step", 5)]
        ],
    }
    for number in range(2)
]


def log(number: int, *lines: str) -> dict[str, Any]:
    """Return an item LOG of whole lines."""
    return {"rank": number, "text": "".join(f"{line}\n" for line in lines)}


def waves(count: int, shift: float = 0.0) -> list[float | None]:
    """Return the values of a curve."""
    return [2 + math.sin(step / 20 + shift) for step in range(count)]


def lines(tab: Tab) -> list[str]:
    """Return the lines of the log that are shown."""
    tab.open("Logs")
    return tab.texts(".nbl-line-text")
