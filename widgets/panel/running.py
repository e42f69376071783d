"""Lower part of a panel: Launch and Stop, the state of the run, and its monitor."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Literal

import traitlets

from notebook_launcher import tracebacks
from notebook_launcher.errors import CallOrderError, ConfigError, RemoteTraceback, RunStoppedError
from notebook_launcher.kernel.display import cell
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.kernel.failures.culprit import Failure
from notebook_launcher.widgets.monitor.monitor import Monitor
from notebook_launcher.wording import format_seconds, plural, without_colours

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.kernel.run.handle import Run

LAUNCH_TIP = "Start a run with these settings"
BUSY_TIP = "A run is in progress. Stop it first."
STOP_TIPS = {
    "running": "Ask the ranks to stop, then interrupt them: takes 3 seconds at most",
    "stopping": "Kill the ranks now",
}
IDLE_TIP = "There is no run to stop."
MARKS = {"error": "✕ ", "done": "✓ ", "busy": "● "}


class Button(traitlets.HasTraits):
    """A button of the page, with the names that buttons of ipywidgets have."""

    description, tooltip = traitlets.Unicode(), traitlets.Unicode()
    disabled = traitlets.Bool(False)

    def __init__(self, clicked: Callable[[], object], **traits: Any) -> None:
        super().__init__(**traits)
        self.click = clicked
        """Do what a click does."""


class RunArea:
    """A launcher of one run at a time, which it follows to its end.

    A launch or a click takes it from "idle" to "starting", the launched run to "running", a click on Stop to
    "stopping", and the end of the run, or of a launch that failed, back to "idle".

    Clicks arrive in the thread in which the kernel processes messages, so no method here waits: a launch has a thread
    of its own, and the run reports its end by a callback. When the panel's cell is run again during a run, the area
    moves to the new panel.

    Args:
        start: Starts the run that the panel describes.
        redraw: Called after each change.
    """

    def __init__(self, start: Callable[[], Run], redraw: Callable[[], object]) -> None:
        self._start, self._redraw = start, redraw
        self.run: Run | None = None
        self.monitor: Monitor | None = None
        self.home: Any = None
        """Message whose cell shows the panel; that cell gets the output of a run that a click started."""
        self.error: list[list[str]] = []
        """The error of the last click or run: pieces of text, each with its CSS classes."""
        self.status, self.status_text = "ready", ""
        """Kind and text of the state of the run, or of the form: "ready", "busy", "done" or "error"."""
        self._lock = threading.RLock()
        """Clicks, starts and ends have threads of their own."""
        self._stage: Literal["idle", "starting", "running", "stopping"] = "idle"
        self._end: tuple[str, str] | None = None
        """The end of the last run, as kind and text; None once the form's state is in view again."""
        self._ready = "", True
        """The launch that a click would start, or why none can be started; and if it can."""
        self._has_moved = self._is_shown = False
        """True if another panel started the run, and once a cell shows the panel."""
        self.launch_button = Button(lambda: self.attempt(self._click_launch), description="Launch")
        self.stop_button = Button(lambda: self.attempt(self._click_stop), description="Stop", disabled=True)

    @property
    def shown(self) -> dict[str, Any]:
        """What the page shows, as JSON."""
        names = ("description", "tooltip", "disabled")
        buttons = {"launch": self.launch_button, "stop": self.stop_button}
        return {
            "buttons": {key: {name: getattr(button, name) for name in names} for key, button in buttons.items()},
            "status": [self.status_text, self.status],
            "error": self.error,
            "monitor": self.monitor.model_id if self.monitor is not None and self.monitor.comm is not None else "",
        }

    @property
    def is_busy(self) -> bool:
        """True while a run is starting or running."""
        return self._stage != "idle"

    def attempt(self, act: Callable[[], object]) -> None:
        """Carry out a click. Show its error here, because no cell would show it."""
        try:
            act()
        except Exception as error:  # an error of any kind is shown
            self._show_error(error)
            self._draw()

    def set_ready(self, text: str, *, is_ready: bool, is_news: bool = False) -> None:
        """Describe the launch that a click would start, or the reason why Launch is disabled.

        After a run, its end stays in view until Launch is disabled or the description is news.
        """
        self._ready = text, is_ready
        if is_news or not is_ready:
            self._end = None
        self._draw()

    def _show_error(self, error: BaseException) -> None:
        """Show an error as a cell does, but without a traceback if the message alone helps."""
        is_plain = isinstance(error, (CallOrderError, ConfigError))
        self.error = [[f"{type(error).__name__}: {error}" if is_plain else exception_text(error), ""]]

    def move(self, start: Callable[[], Run], redraw: Callable[[], object], home: Any) -> None:
        """Move to the panel that replaces the present one, also while a run is starting."""
        with self._lock:
            self._start, self._redraw, self.home = start, redraw, home
            self._has_moved, self._is_shown = True, False
            if self._stage != "starting":
                self._show_monitor()

    def show(self) -> None:
        """Note that the panel is shown. Keep a picture below it if its run was started by another panel."""
        self._is_shown = True
        if self._has_moved and self.is_busy:
            self._keep_picture()

    def close(self) -> None:
        """Close the monitor; the run continues."""
        if self.monitor is not None:
            self.monitor.close()

    def launch(self, start: Callable[[], Run]) -> Run:
        """Launch in this thread. Raise `CallOrderError` during another run."""
        if not self._begin():
            raise CallOrderError(
                "this panel's run is not over. Wait for it with panel.run.wait(), or stop it with panel.run.stop()."
            )
        try:
            return self._launch(start)
        except BaseException:
            self._become_idle("error", "Nothing was started.")
            raise

    def _click_launch(self) -> None:
        if self._ready[1] and self._begin():
            threading.Thread(target=self._launch_in_thread, name="notebook-launcher panel", daemon=True).start()

    def _launch_in_thread(self) -> None:
        # If the panel was never shown, it has no cell; the run then writes to the cell whose code clicked.
        with cell.answering(self.home):
            try:
                self._launch(self._start)
            except BaseException as error:  # no cell would show it
                self._show_error(error)
                self._become_idle("error", "Nothing was started.")

    def _begin(self) -> bool:
        with self._lock:
            if self.is_busy:
                return False
            self._stage, self._end, self.error, self._has_moved = "starting", None, [], False
        self._draw()
        return True

    def _launch(self, start: Callable[[], Run]) -> Run:
        run = start()
        with self._lock:
            self.run, self._stage = run, "running"
            self.attempt(self._show_monitor)
        self._draw()
        run.add_done_callback(lambda _: self._over(run))
        return run

    def _show_monitor(self) -> None:
        assert self.run is not None
        old, self.monitor = self.monitor, Monitor(self.run)
        if self._is_shown or not self._has_moved:
            self._keep_picture()
        if old is not None:
            old.close()

    def _keep_picture(self) -> None:
        with cell.answering(self.home) if self._has_moved else contextlib.nullcontext():
            sink = make_sink()
        if self.monitor is not None and sink.is_cell:
            self.monitor.keep_picture(sink)

    def _click_stop(self) -> None:
        with self._lock:
            if self.run is None or self._stage not in ("running", "stopping"):
                return
            is_second, self._stage = self._stage == "stopping", "stopping"
        self._draw()
        self.run.stop(wait=False, at_once=is_second)

    def _over(self, run: Run) -> None:
        error, seconds = run.exception(0), format_seconds(run.snapshot().seconds)
        if error is None:
            end = "done", f"{run.name}: done in {seconds}. panel.results has the ranks' results."
        elif isinstance(error, RunStoppedError):
            end = "done", f"{run.name}: stopped after {seconds}."
        else:
            self.attempt(lambda: self._show_error(error))
            end = "error", f"{run.name}: failed after {seconds}."
        self._become_idle(*end)
        if self.monitor is not None:
            self.attempt(self.monitor.finish)

    def _become_idle(self, kind: str, text: str) -> None:
        with self._lock:
            self._stage, self._end = "idle", (kind, text)
        self._draw()

    def _draw(self) -> None:
        """Show the stage in the status and in the buttons."""
        with self._lock:
            (ready, is_ready), stage = self._ready, self._stage
            if stage == "idle":
                kind, text = self._end or ("ready" if is_ready else "error", ready)
            elif self.run is None or stage == "starting":
                kind, text = "busy", "Starting."
            elif stage == "running":
                kind, text = "busy", f"{self.run.name} is running on {plural(len(self.run.ranks), 'rank')}."
            else:
                kind, text = "busy", "Stopping the ranks. Kill ends them at once."
            self.status, self.status_text = kind, MARKS.get(kind, "") + text
            launch, stop = self.launch_button, self.stop_button
            launch.tooltip = BUSY_TIP if self.is_busy else LAUNCH_TIP if is_ready else ready
            stop.tooltip = STOP_TIPS.get(stage, IDLE_TIP)
            stop.description = "Kill" if stage == "stopping" else "Stop"
            stop.disabled = stage not in STOP_TIPS
            launch.disabled = self.is_busy or not is_ready
            self._redraw()


def exception_text(error: BaseException) -> str:
    """Return the traceback that the running shell would print, without colours; without a shell, Python's.

    Of a failed run, it has one line in place of the rank's traceback, which the monitor has.
    """
    if isinstance(error.__cause__, RemoteTraceback):
        text = str(error.__cause__)  # It is complete: a cell would add the frames that raised it in the kernel.
    else:
        text = "\n".join(getattr(error, "_render_traceback_", lambda: tracebacks.render(error))())
    failures = getattr(error, "failures", None)  # Perhaps an attribute of the user's own.
    first = failures[0] if isinstance(failures, tuple) and failures else None
    if isinstance(first, Failure) and first.traceback.strip():
        text = text.replace(first.traceback.rstrip(), first.summary)
    return without_colours(text).strip()
