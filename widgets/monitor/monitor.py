"""`Monitor(run)`: live view of a run, which stays as a picture when the run is over."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import weakref
from typing import TYPE_CHECKING, Any, cast

import anywidget
import traitlets

from notebook_launcher.drawing.charts import AXES
from notebook_launcher.drawing.plots import PlotOptions
from notebook_launcher.errors import ConfigError
from notebook_launcher.kernel.comms.tap import open_tap
from notebook_launcher.kernel.display.cell import NOTHING, has_picture, kept_picture, line_of, picture_of
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.widgets.assets import STATIC, join_modules, monitor_css
from notebook_launcher.widgets.monitor.feed import Feed, profile_item, sample_item
from notebook_launcher.widgets.place import ReplacedOutput, open_widgets, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.history.schema import RunReader
    from notebook_launcher.kernel.comms.tap import Tap
    from notebook_launcher.kernel.display.cell import Bundle
    from notebook_launcher.kernel.display.sink import Sink
    from notebook_launcher.kernel.run.handle import AnyRun

INTERVAL, LONGEST_INTERVAL = 0.25, 1.0
"""Seconds between two messages, for all ranks together; Jupyter's server drops what comes above 1000 messages/s."""
SHARE = 0.1
"""Part of a core that messages may take before there are fewer of them: one about a thousand ranks takes 60 ms."""
KEEP_AFTER, KEEP_EVERY = 2.0, 30.0
"""Seconds until the first picture of the run below the monitor. Each further wait is twice as long, up to the second
number."""
END_BUDGET = 5.0
MAX_EXPLORABLE = 8
"""Number of monitors that stay open after their runs, the newest: each holds its run with metrics and logs."""
MAX_TYPED = 200
"""Characters of a setting's name and of its new value."""
DEAF_HINT = "These buttons work once the cell has ended. The kernel's interrupt button (the square) stops the run now."


class Monitor(anywidget.AnyWidget):
    """A view of a run: ranks, progress, curves, timeline and logs, with buttons to stop, to save and to show stacks.

        run = launch(train, 4)
        Monitor(run)

    The page asks for the whole run when it is ready, and again after a reload. After that it receives only new data,
    at most four times a second. When the run ends, each output that shows the monitor is replaced by tables and a
    drawing. These need no kernel, so a saved notebook shows the run to everybody. Until then a folded picture stands
    below the monitor, in case the kernel dies first. A run that is already over is shown as it was and can be explored.

    Args:
        run: A run that `launch` returned or `open_run` read.

    Raises:
        ConfigError: `run` is not a run.
    """

    # As text: anywidget would listen to a file's changes for ever, and so keep every monitor alive, with its run.
    _esm = join_modules(STATIC / "monitor/main.js")
    _css = monitor_css()
    title = traitlets.Unicode().tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)
    """Name by which the page finds the pictures of the run that the monitor may cover."""

    def __init__(self, run: RunReader, **traits: Any) -> None:
        if not all(callable(getattr(run, name, None)) for name in ("snapshot", "metrics_since", "logs_since")):
            raise ConfigError(f"Monitor({run!r}): not a run. Pass what launch(...) returned, or open_run(...).")
        self._run = run
        self._wait: Callable[[float | None], bool] | None = getattr(run, "wait", None)
        """Waits for the end of a live run; None: the run was read from its folder."""
        self._lock = threading.RLock()
        """Held while the feed, the outputs or the fields below change: messages of the page, its requests and the
        ticker have threads of their own."""
        self._pages: set[str] = set()
        """Identifiers of the pages that have sent "hello"; a reload makes a new identifier."""
        self._is_over = False
        """True once the pictures of the end replace the monitor."""
        self._asks_for_all = False
        """True if the next message is the whole run."""
        self._views: list[ReplacedOutput] = []
        """Outputs that show the monitor."""
        self._pictures: list[ReplacedOutput] = []
        """Outputs for pictures of the run."""
        self._ticker: threading.Thread | None = None
        """Thread that sends the news of a live run and renews its pictures."""
        self._tap: Tap | None = None
        """Receives the page's messages while the cell is busy; None: nothing does."""
        self._comm_id = ""
        """Name of the connection to the page, which the tap needs after the comm was closed."""
        self._sink = make_sink()
        """The cell that made the monitor, to which its messages belong."""
        self.plot_options = PlotOptions()
        """Options by which the picture that stays draws the curves: the page's last options."""
        self.leaves_picture = True
        """True if a picture of the run replaces the monitor once the run is over."""
        self.explorable_since = 0.0
        """Monotonic time of the run's end if the monitor stays open after the run, else 0."""
        can_act = self._wait is not None and callable(getattr(run, "stop", None))
        self._feed = Feed(run, can_act=can_act, outlives=callable(getattr(run, "follow_in_cell", None)))
        self._requests = PageRequests(run, self._feed, self._lock)
        # A strong reference would make a cycle; without a cycle, the run's files are closed with its last reader.
        receive = weakref.WeakMethod(self._receive)
        # Before the comm opens: a panel makes its monitor in a thread, so the page may answer at once.
        self.on_msg(lambda _, content, __: (receive() or id)(content))
        super().__init__(title=getattr(run, "name", "") or run.snapshot().name, key=uuid.uuid4().hex, **traits)
        if self.is_live:
            self._comm_id = self.comm.comm_id
            self._tap = open_tap(self._comm_id, self._receive)
            if self._tap is None and self._sink.is_cell:
                self._feed.action_hint = DEAF_HINT

    @property
    def run(self) -> RunReader:
        """The run that the monitor shows."""
        return self._run

    @property
    def is_live(self) -> bool:
        """True until the run is over."""
        return self._wait is not None and not self._wait(0)

    @property
    def was_seen(self) -> bool:
        """True once a front end has drawn the monitor and sent a message."""
        return bool(self._pages)

    def show(self, sink: Sink | None = None) -> None:
        """Show the monitor in a cell, by default the running cell. `display(monitor)` calls this."""
        sink = sink or make_sink()
        if self.comm is None:  # The monitor is closed: the run is over and has left its picture.
            for bundle in self._picture():
                sink.display(bundle)
            return
        with self._lock:  # The run may end meanwhile, and then every view is replaced, in the ticker's thread.
            is_live = self.is_live and not self._is_over
            is_replaced = is_live or not self.leaves_picture
            if is_replaced:
                self._views.append(ReplacedOutput.show(sink, self._bundle()))
            else:
                self._show_with_picture(sink)
        if is_replaced:
            self.keep_picture(sink)

    def _show_with_picture(self, sink: Sink) -> None:
        """Show the monitor of a run that is over, and below it the picture that the page hides for as long."""
        self._feed.read_metrics()
        snapshot = self._run.snapshot()
        ReplacedOutput.show(sink, {**view_of(self), **line_of(snapshot)})
        sink.display(kept_picture(snapshot, self._feed.curves, self.key, opened=True))

    def keep_picture(self, sink: Sink) -> None:
        """Keep a folded picture of the run at the end of a cell's outputs, renewed during the run and at its end.

        `show` does this below the monitor itself. If another widget holds the monitor, its code calls this method for
        the cell that shows that widget.
        """
        below = ReplacedOutput.show(sink, NOTHING)  # Empty so far, and empty HTML takes no room.
        with self._lock:
            self._pictures.append(below)
        self._start_ticker()

    def _ipython_display_(self, **_: Any) -> None:
        self.show()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # ipywidgets 7 removes `_ipython_display_` from a closed widget.
        return (self._picture()[0] if self.comm is None else self._bundle()), {}

    def _bundle(self) -> dict[str, Any]:
        """Return the widget, with text and HTML for front ends that show no widgets."""
        if self.is_live:
            words = f"{self.title}: the live monitor needs a front end with widgets; print(run.report()) is its text"
            shown = {"text/plain": words}
        else:
            shown, _ = self._picture()
        return {**view_of(self), **shown}

    def _picture(self, key: str = "") -> tuple[dict[str, str], dict[str, str]]:
        with self._lock:
            self._feed.read_metrics()
            return picture_of(self._run.snapshot(), self._feed.curves, key, options=self.plot_options)

    def poll(self) -> float | None:
        """Process pending messages from the page. Return the seconds until the next call is needed; None: never.

        Code that makes the main thread wait calls this method.
        """
        return None if self._tap is None else self._tap.poll()

    def _receive(self, content: Any) -> None:
        """Process one message from the page; callable from any thread, and never blocks."""
        kind = content.get("type") if isinstance(content, dict) else None
        match kind:
            case "hello":
                self._asks_for_all = True
                self._pages.add(str(content.get("page", "")))
                if not self._start_ticker():
                    self._send_news()
            case "draw":
                self.plot_options = plot_options(content)
                with self._lock:
                    self._feed.draw(self.plot_options, content.get("turn", 0))
                self._on_answer()
            case "zoom" | "csv" as name:
                self._requests.read(name, content, self._on_answer)
            case _ if self._feed.can_act:
                self._requests.carry_out(kind, content, self._on_answer)

    def _on_answer(self) -> None:
        if not self.is_live:  # The ticker sends the news of a live run.
            self._send_news()

    def _start_ticker(self) -> bool:
        """Start the thread that sends messages and at last replaces the views, if there is something to do.

        Return True if the thread runs.
        """
        with self._lock:
            has_outputs_left = self._pictures and not self._is_over
            if self._ticker is None and self._wait is not None and (self.is_live or has_outputs_left):
                name = f"notebook-launcher monitor of {self.title}"
                self._ticker = threading.Thread(target=self._tick, name=name, daemon=True)
                self._ticker.start()
            return self._ticker is not None and self._ticker.is_alive()

    def _tick(self) -> None:
        assert self._wait is not None
        keep_at, wait = time.monotonic() + KEEP_AFTER, KEEP_AFTER
        try:
            interval = INTERVAL
            while self.comm is not None and not self._wait(interval):
                if self._pages:
                    began = time.thread_time()
                    self._send_news()
                    interval = interval_after(time.thread_time() - began)
                if time.monotonic() >= keep_at:
                    self._keep_picture()
                    wait = min(2 * wait, KEEP_EVERY)
                    keep_at = time.monotonic() + wait
        finally:
            self._end()  # Even after an error of this package, which Python then prints.

    def _send_news(self) -> None:
        with self._lock:
            asks_for_all, self._asks_for_all = self._asks_for_all, False
            message = self._feed.reset() if asks_for_all else self._feed.update(is_last=not self.is_live)
        if message is not None:
            self._sink.call(self.send, message)

    def _keep_picture(self) -> None:
        """Renew the picture that stays if the kernel dies now, when the page loses its data and its widget."""
        with self._lock, contextlib.suppress(Exception):  # An error of the drawing must not stop the page.
            if not self._pages:
                self._feed.read_metrics()  # Once a page listens, `_send_news` reads them.
            self._draw_pictures(kept_picture(self._run.snapshot(), self._feed.curves, self.key))

    def _draw_pictures(self, picture: Bundle) -> None:
        for below in self._pictures:
            below.replace(picture)

    def finish(self) -> str:
        """Wait until a picture has replaced the monitor of a run that is over; the monitor of a live run stays.

        Returns:
            The key of the monitor if it stays open, to be explored in its page; else an empty text.
        """
        ticker = self._ticker
        if self.is_live:
            self.leaves_picture = True  # The code that would leave a picture has ended with its cell.
            return ""
        if ticker is not None:
            ticker.join(END_BUDGET)
        elif self._wait is not None:
            self._end()
        return self.key if self.explorable_since else ""

    def leave(self, bundles: Sequence[Bundle]) -> Sequence[Bundle]:
        """Show bundles where the page had the monitor and the picture below it; return those that have no such place.

        A page that was reloaded during the run does not know the places any more.
        """
        with self._lock:
            places = [*self._views[:1], *self._pictures[:1]] if len(self._pages) == 1 else []
            for place, bundle in zip(places, bundles, strict=False):
                place.replace(bundle)
        return bundles[len(places) :]

    def _end(self) -> None:
        """Send the last messages, and replace the monitor by pictures."""
        if self._is_over:
            return
        self._is_over = True
        if self._tap is not None:
            self._tap.close(self._comm_id)
        if self.comm is None:
            return
        if self._pages:
            self._send_news()
        if self._views:
            if self._pages and self._has_picture():
                self.explorable_since = time.monotonic()
            self._replace_views()
            # After a reload JupyterLab does not know the ids of outputs, so no picture arrives and the widget stays.
            if not self.explorable_since and len(self._pages) <= 1:
                self._sink.call(self.close)
            self._close_older()
        elif self._pictures:
            self._keep_picture()
        self._sink.flush()

    def _has_picture(self) -> bool:
        with contextlib.suppress(Exception):  # An error of the drawing is shown where the picture is drawn.
            return has_picture(self._run.snapshot(), self._feed.curves)
        return False

    def _close_older(self) -> None:
        """Close all but the newest monitors of earlier runs; their pictures stay."""
        still_open = [widget for widget in open_widgets() if isinstance(widget, Monitor) and widget.explorable_since]
        for monitor in sorted(still_open, key=lambda monitor: monitor.explorable_since)[:-MAX_EXPLORABLE]:
            self._sink.call(monitor.close)

    def _replace_views(self) -> None:
        try:
            key = self.key if self.explorable_since else ""
            tables, drawing = self._picture(key) if self.leaves_picture else (NOTHING, NOTHING)
        except Exception as error:  # no dead widget may stay, whatever error the drawing raises
            reason = f"{self.title} has ended; its picture could not be drawn: {type(error).__name__}: {error}"
            tables, drawing = {"text/plain": reason}, NOTHING
        with self._lock:
            for view in self._views:
                view.replace(tables)
            self._draw_pictures(drawing)

    def close(self) -> None:
        """Close the widget; the run continues."""
        tap = getattr(self, "_tap", None)  # ipywidgets also closes a monitor whose constructor has failed.
        if tap is not None:
            tap.close(self._comm_id)
        layout = self._trait_values.get("layout")  # Reading `self.layout` would make ipywidgets 7 create one.
        super().close()
        if layout is not None:
            layout.close()  # The layout is a widget with a comm of its own.


def show_alone(run: RunReader, sink: Sink) -> Monitor:
    """Show the monitor of a run that shows itself, in its cell until the run is over; its own code leaves a picture."""
    monitor = Monitor(run)
    monitor.leaves_picture = False
    monitor.show(sink)
    return monitor


class PageRequests:
    """The requests of a page about one run: stop, save, pause, stacks, samples, profiles and settings.

    What comes of each goes to the page by the feed. Nothing here blocks: what waits for ranks has a thread.

    Args:
        run: The run; a page can act on live ones alone.
        feed: The feed of the page.
        lock: Held while the feed changes.
    """

    def __init__(self, run: RunReader, feed: Feed, lock: threading.RLock) -> None:
        self._run = cast("AnyRun", run)
        self._feed = feed
        self._lock = lock
        self._busy_with: set[str] = set()
        """Names of the requests that are carried out in threads."""

    def carry_out(self, kind: object, content: dict[str, Any], answered: Callable[[], None]) -> None:
        """Carry out a request; what is none is ignored. `answered` is called after a notice was added to the feed."""
        run = self._run
        match kind:
            case "stop":
                self._attempt(lambda: run.stop(after_step=True, wait=False), answered)
            case "interrupt":
                self._attempt(lambda: run.stop(wait=False), answered)
            case "stacks":
                self._in_thread("stacks", lambda: self._attempt(lambda: str(run.stacks()), answered))
            case "save" | "pause" | "resume" as name:
                self._in_thread(name, lambda: self._attempt(getattr(run, name), answered))
            case "sample" | "profile" as name:
                self._in_thread(name, lambda: self._measure(name, content.get("amount")))
            case "set":
                setting, text = (str(content.get(key, ""))[:MAX_TYPED] for key in ("name", "value"))
                self._in_thread(f"set {setting}", lambda: self._set(setting, text))

    def read(self, kind: str, content: dict[str, Any], answered: Callable[[], None]) -> None:
        """Carry out a request that reads all values, of live and of recorded runs: a zoom, or a file."""
        key, low, high = str(content.get("key", "")), content.get("low"), content.get("high")

        def work() -> None:
            with self._lock:
                if kind == "csv":
                    self._feed.offer_csv(str(content.get("page", "")))
                elif isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high:
                    self._feed.zoom(key, low, high)
            answered()

        self._in_thread(f"{kind} {key}", work)

    def _set(self, name: str, text: str) -> None:
        """Change a setting to what was typed. An error is shown beside the field."""
        problem = ""
        try:
            self._run.set_from_page(name, text)
        except Exception as error:  # whatever it is, the page shows it
            problem = str(error)
        with self._lock:
            self._feed.answer(name, problem)

    def _measure(self, kind: str, amount: Any) -> None:
        """Sample for some seconds, or profile some updates; send what was found, or the reason why nothing was."""
        run = self._run
        try:
            item = sample_item(run.sample(amount)) if kind == "sample" else profile_item(run.profile(amount))
        except Exception as error:  # whatever it is, the page shows it
            item = {"kind": kind, "drawing": "", "tables": [], "problem": str(error)}
        with self._lock:
            self._feed.finding(item)

    def _attempt(self, act: Callable[[], str | None], answered: Callable[[], None]) -> None:
        """Do what was asked for. An error becomes a notice, because no cell would show it."""
        try:
            answer = act()
        except Exception as error:  # whatever it is, the page shows it
            answer = f"{type(error).__name__}: {error}"
        if answer:
            with self._lock:
                self._feed.notice(answer)
            answered()

    def _in_thread(self, name: str, act: Callable[[], object]) -> None:
        """Do something in a thread; one request of each name at a time."""
        with self._lock:
            if name in self._busy_with:
                return
            self._busy_with.add(name)

        def work() -> None:
            try:
                act()
            finally:
                self._busy_with.discard(name)

        threading.Thread(target=work, name=f"notebook-launcher monitor {name}", daemon=True).start()


def interval_after(seconds: float) -> float:
    """Return the seconds until the next message, after one that took `seconds` of a core."""
    return min(LONGEST_INTERVAL, max(INTERVAL, seconds / SHARE))


def plot_options(content: dict[str, Any]) -> PlotOptions:
    """Return the options of a message; what is none, which only a page of another version sends, has its default."""
    axis, smoothing, average = (content.get(name) for name in ("axis", "smoothing", "average"))
    return PlotOptions(
        axis=axis if axis in AXES else "step",
        grouped=content.get("grouped") is not False,
        average=average if isinstance(average, bool) else None,
        log=content.get("log") is True,
        smoothing=min(max(smoothing, 0.0), 0.99) if isinstance(smoothing, (int, float)) else 0.0,
    )
