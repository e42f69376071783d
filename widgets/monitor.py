"""`Monitor(run)`: a run in front of your eyes, while it lasts and afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_launcher.kernel import cell
from notebook_launcher.kernel.picture import NOTHING, folded_picture, has_picture, picture_of
from notebook_launcher.widgets.feed import Feed
from notebook_launcher.widgets.place import open_widgets
from notebook_launcher.widgets.tap import open_tap

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.history.schema import RunReader
    from notebook_launcher.kernel.cell import Sink
    from notebook_launcher.kernel.picture import Bundle
    from notebook_launcher.widgets.tap import Tap

__all__ = ["Monitor"]

STATIC = Path(__file__).parent / "static"
INTERVAL = 0.25
"""Seconds between two messages, for all ranks together; Jupyter's server drops what comes above 1000 messages/s."""
KEEP_AFTER, KEEP_EVERY = 2.0, 30.0
"""Seconds until a picture of the run is kept below the monitor; twice as many to each next one, up to the second."""
END_BUDGET = 5.0
MAX_EXPLORABLE = 8
"""Monitors of runs that are over which stay open, the newest: each holds its run with its metrics and logs."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
DEAF_HINT = "These buttons work once the cell has ended. The kernel's interrupt button (the square) stops the run now."


def _source(name: str) -> str | Path:
    """Return what a file of the page says.

    anywidget would take a path, and from then on keep every monitor alive, with its run: each one listens to the
    file's changes for ever. Who edits the file wants that; ANYWIDGET_HMR=1 is how they say so.
    """
    path = STATIC / name
    return path if os.environ.get("ANYWIDGET_HMR") else path.read_text(encoding="utf-8")


class Monitor(anywidget.AnyWidget):
    """Shows a run: its ranks, progress, curves, timeline and logs; stops it, and asks it for stacks and checkpoints.

        run = launch(train, 4)
        Monitor(run)

    The page asks for the whole run when it is ready, and again after a reload; from then on it is sent what is
    new, at most four times a second. When the run ends, each output that shows the monitor is replaced by
    tables and a drawing, which need no kernel: a saved notebook shows the run to everybody. Until then a folded
    picture is kept below it, for the case that the kernel dies first. A run that is over already is shown as it
    was, to look around in.

    Args:
        run: What `launch` returned, or what `open_run` read.

    Raises:
        TypeError: `run` is neither.
    """

    _esm = _source("monitor.js")
    _css = _source("monitor.css")
    title = traitlets.Unicode().tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)
    """By this the page finds the pictures of the run that it may cover."""

    def __init__(self, run: RunReader, **traits: Any) -> None:
        if not all(callable(getattr(run, name, None)) for name in ("snapshot", "metrics_since", "logs_since")):
            msg = f"Monitor({run!r}): not a run. Pass what launch(...) returned, or open_run(...)."
            raise TypeError(msg)
        self._run = run
        self._wait: Callable[[float | None], bool] | None = getattr(run, "wait", None)
        self._lock = threading.RLock()
        self._seen = threading.Event()
        self._pages: set[str] = set()
        self._over = threading.Event()
        self._asks_for_all = False
        self._busy_with: set[str] = set()
        self._views: list[tuple[Sink, str]] = []
        """Outputs that show the monitor, each a cell and the output's id."""
        self._pictures: list[tuple[Sink, str]] = []
        """Outputs for pictures of the run."""
        self._ticker: threading.Thread | None = None
        self._tap: Tap | None = None
        self._comm_id = ""
        self._sink = cell.make_sink()
        self.leaves_picture = True
        """Whether a picture of the run stands where the monitor was, once the run is over."""
        self.explorable_since = 0.0
        """The time of the run's end by the monotonic clock, if the monitor stays open after it, else 0."""
        super().__init__(title=getattr(run, "name", "") or run.snapshot().name, key=uuid.uuid4().hex, **traits)
        self._feed = Feed(run, can_act=self._wait is not None and callable(getattr(run, "stop", None)))
        hear = weakref.WeakMethod(self._hear)  # Without a cycle, the run's files are closed with its last reader.
        self.on_msg(lambda _, content, __: (hear() or id)(content))
        if self.is_live:
            self._comm_id = self.comm.comm_id
            self._tap = open_tap(self._comm_id, self._hear)
            if self._tap is None and self._sink.is_cell:
                self._feed.action_hint = DEAF_HINT

    @property
    def run(self) -> RunReader:
        """The run that is shown."""
        return self._run

    @property
    def is_live(self) -> bool:
        """Whether the run goes on."""
        return self._wait is not None and not self._wait(0)

    @property
    def was_seen(self) -> bool:
        """Whether a front end has drawn the monitor, as far as is known."""
        return self._seen.is_set()

    # Showing.

    def show(self, sink: Sink | None = None) -> None:
        """Show the monitor in a cell, the running one if none is given; what `display(monitor)` does."""
        sink = sink or cell.make_sink()
        if self.comm is None:  # Closed: the run is over and has left its picture.
            for bundle in self._picture():
                sink.display(bundle)
            return
        view = uuid.uuid4().hex
        sink.display(self._bundle(), transient={"display_id": view})
        if self.is_live:
            with self._lock:
                self._views.append((sink, view))
            self.keep_picture(sink)

    def keep_picture(self, sink: Sink) -> None:
        """Keep a folded picture of the run at the end of a cell's outputs: renewed while it goes on, and when it ends.

        Below the monitor itself this is done by `show`. Whoever puts the monitor into another widget calls it for
        the cell that shows that one.
        """
        below = uuid.uuid4().hex
        # An output of its own, empty as yet: such HTML takes no room.
        sink.display(NOTHING, transient={"display_id": below})
        with self._lock:
            self._pictures.append((sink, below))
        self._start_ticker()

    def _ipython_display_(self, **_: Any) -> None:
        self.show()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # ipywidgets 7 takes `_ipython_display_` away from a widget that is closed.
        return (self._picture()[0] if self.comm is None else self._bundle()), {}

    def _bundle(self) -> dict[str, Any]:
        """Return the widget, and what is shown where there are no widgets."""
        if self.is_live:
            shown = {"text/plain": f"{self.title}: the live monitor needs a front end that displays widgets"}
        else:
            shown, _ = self._picture()
        return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}, **shown}

    def _picture(self, key: str = "") -> tuple[dict[str, str], dict[str, str]]:
        with self._lock:
            self._feed.read_metrics()
            return picture_of(self._run.snapshot(), self._feed.curves, key)

    # Hearing the page.

    def poll(self) -> float | None:
        """Hear what the page has sent, if that takes a look; return when to look again, in seconds.

        For whoever keeps the main thread waiting.
        """
        return None if self._tap is None else self._tap.poll()

    def _hear(self, content: Any) -> None:
        """Take a message of the page's; from any thread, and without blocking."""
        kind = content.get("type") if isinstance(content, dict) else None
        run: Any = self._run
        match kind:
            case "hello":
                self._pages.add(str(content.get("page", "")))
                self._seen.set()
                self._asks_for_all = True
                if not self._start_ticker():
                    self._send_news()
            case "stop" if self._feed.can_act:
                self._attempt(lambda: run.stop(after_step=True, wait=False))
            case "interrupt" if self._feed.can_act:
                self._attempt(lambda: run.stop(wait=False))
            case "stacks" if self._feed.can_act:
                self._attempt_aside("stacks", lambda: str(run.stacks()))
            case "save" if self._feed.can_act:
                self._attempt_aside("save", run.save)

    def _attempt(self, act: Callable[[], str | None]) -> None:
        """Do what was asked for; an error becomes a notice, since no cell waits for it."""
        try:
            answer = act()
        except Exception as error:  # noqa: BLE001 - whatever it is, the page shows it
            answer = f"{type(error).__name__}: {error}"
        if answer:
            with self._lock:
                self._feed.notice(answer)
            if not self.is_live:
                self._send_news()

    def _attempt_aside(self, name: str, act: Callable[[], str | None]) -> None:
        """Do in a thread what has to wait for the ranks, one at a time of each kind."""
        with self._lock:
            if name in self._busy_with:
                return
            self._busy_with.add(name)

        def work() -> None:
            try:
                self._attempt(act)
            finally:
                self._busy_with.discard(name)

        threading.Thread(target=work, name=f"notebook-launcher monitor {name}", daemon=True).start()

    # Telling the page.

    def _start_ticker(self) -> bool:
        """Start the one thread that sends, if the run goes on; return whether there is one."""
        with self._lock:
            if self._ticker is None and self.is_live:
                name = f"notebook-launcher monitor of {self.title}"
                self._ticker = threading.Thread(target=self._tick, name=name, daemon=True)
                self._ticker.start()
            return self._ticker is not None and self._ticker.is_alive()

    def _tick(self) -> None:
        assert self._wait is not None
        keep_at, pause = time.monotonic() + KEEP_AFTER, KEEP_AFTER
        try:
            while self.comm is not None and not self._wait(INTERVAL):
                if self._seen.is_set():
                    self._send_news()
                if time.monotonic() >= keep_at:
                    self._keep_picture()
                    pause = min(2 * pause, KEEP_EVERY)
                    keep_at = time.monotonic() + pause
        finally:
            self._end()  # Also after a fault of ours, which Python then prints.

    def _send_news(self) -> None:
        with self._lock:
            asks_for_all, self._asks_for_all = self._asks_for_all, False
            message = self._feed.reset() if asks_for_all else self._feed.update()
        if message is not None:
            self._sink.call(self.send, message)

    def _keep_picture(self) -> None:
        """Renew what is left of the run if the kernel dies now: a page without it has no data, and no widget."""
        with self._lock, contextlib.suppress(Exception):  # Whatever the drawing runs into, the page goes on.
            if not self._seen.is_set():
                self._feed.read_metrics()  # Else they are read, and sent, with the news.
            self._draw_pictures(folded_picture(self._run.snapshot(), self._feed.curves))

    def _draw_pictures(self, picture: Bundle) -> None:
        for sink, below in self._pictures:
            sink.display(picture, transient={"display_id": below}, update=True)

    # The end.

    def finish(self) -> str:
        """Wait until the picture of a run that is over stands where the monitor was.

        Returns:
            The key of the monitor if it stays open, to be explored in its page; else nothing.
        """
        ticker = self._ticker
        if ticker is not None:
            ticker.join(END_BUDGET)
        elif self._wait is not None and self._wait(0):
            self._end()
        return self.key if self.explorable_since else ""

    def _end(self) -> None:
        """Send the last news, and put pictures where the monitor was shown."""
        if self._over.is_set():
            return
        self._over.set()
        if self._tap is not None:
            self._tap.close(self._comm_id)
        if self.comm is None:
            return
        if self._seen.is_set():
            self._send_news()
        if self._views:
            if self._seen.is_set() and self._has_picture():
                self.explorable_since = time.monotonic()
            self._replace_views()
            # After a reload JupyterLab knows no output's id: where the picture does not come the widget stays.
            if not self.explorable_since and len(self._pages) <= 1:
                self._sink.call(self.close)
            self._close_older()
        elif self._pictures:
            self._keep_picture()
        self._sink.flush()

    def _has_picture(self) -> bool:
        with contextlib.suppress(Exception):  # A fault of the drawing's shows where the picture is drawn.
            return has_picture(self._run.snapshot(), self._feed.curves)
        return False

    def _close_older(self) -> None:
        """Close the monitors of earlier runs beyond the newest few; their pictures stay."""
        still_open = [widget for widget in open_widgets() if isinstance(widget, Monitor) and widget.explorable_since]
        for monitor in sorted(still_open, key=lambda one: one.explorable_since)[:-MAX_EXPLORABLE]:
            self._sink.call(monitor.close)

    def _replace_views(self) -> None:
        try:
            key = self.key if self.explorable_since else ""
            tables, drawing = self._picture(key) if self.leaves_picture else (NOTHING, NOTHING)
        except Exception as error:  # noqa: BLE001 - no dead widget may stay, whatever the drawing runs into
            reason = f"{self.title} has ended; its picture could not be drawn: {type(error).__name__}: {error}"
            tables, drawing = {"text/plain": reason}, NOTHING
        for sink, view in self._views:
            sink.display(tables, transient={"display_id": view}, update=True)
        self._draw_pictures(drawing)

    def close(self) -> None:
        """Close the widget; the run goes on."""
        tap = getattr(self, "_tap", None)  # Also called for one whose making has failed.
        if tap is not None:
            tap.close(self._comm_id)
        layout = self._trait_values.get("layout")  # Asked for, ipywidgets 7 would make one.
        super().close()
        if layout is not None:
            layout.close()  # A widget with a comm of its own.
