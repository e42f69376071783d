"""Lower part of a panel: Launch and Stop, the state of the run, and its monitor."""

from __future__ import annotations

import re
import threading
import traceback
from typing import TYPE_CHECKING, Any, Literal

import traitlets

from notebook_launcher.errors import CallOrderError, ConfigError, RemoteTraceback, RunStoppedError
from notebook_launcher.ipython_shell import running_shell
from notebook_launcher.kernel.display import cell
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.kernel.failures.culprit import Failure
from notebook_launcher.widgets.monitor.monitor import Monitor
from notebook_launcher.wording import format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.kernel.run.handle import Run


LAUNCH_TIP = "Start a run with these settings"
BUSY_TIP = "A run is in progress. Stop it first."
STOP_TIP = "Ask the ranks to stop, then interrupt them: takes 3 seconds at most"
IDLE_TIP = "There is no run to stop."
KILL_TIP = "Kill the ranks now"


class Button(traitlets.HasTraits):
    """A button of the page, with the names that buttons of ipywidgets have."""

    description, tooltip = traitlets.Unicode(), traitlets.Unicode()
    disabled = traitlets.Bool(False)

    def __init__(self, clicked: Callable[[], object], **traits: Any) -> None:
        super().__init__(**traits)
        self.click = clicked
        """Do what a click does."""


class RunArea(traitlets.HasTraits):
    """A launcher of one run at a time, which it follows to its end.

    Clicks arrive in the thread in which the kernel processes messages, so no method here waits: a launch has a thread
    of its own, and the run reports its end by a callback.

    When the panel's cell is run again, the area hands its run to its successor, the area of the new panel:
    `successor.take_over(area)`.
    """

    status_text = traitlets.Unicode()
    """The state of the run, or of the form."""
    status_kind = traitlets.Unicode()
    """One of "ready", "busy", "done" and "error"."""
    error: Any = traitlets.List()
    """The error of the last click or run: pieces of text, each with its CSS classes."""
    monitor = traitlets.Any()
    """The monitor of the newest run; None before the first."""

    def __init__(self, start: Callable[[], Run]) -> None:
        self.run: Run | None = None
        """The present run, else the last one."""
        self.home: Any = None
        """Message whose cell shows the panel; that cell gets the output of a run that a click started."""
        self._start = start
        """Starts the run that the panel describes."""
        self._lock = threading.RLock()
        """Held while `_stage`, `run` and `_successor` change: clicks, starts and ends have threads of their own."""
        self._stage: Literal["idle", "starting", "running", "stopping"] = "idle"
        self._successor: RunArea | None = None
        """The area of the panel that has replaced this one."""
        self._is_successor = False
        """True if another area started the run."""
        self._is_shown = False
        """True once the panel was shown in a cell."""
        self._ready = "", True
        """The launch that a click would start, or why none can be started; and if it can."""
        self._shows_readiness = True
        """True if the status shows `_ready`, not the state or the end of a run."""
        self.launch_button = Button(lambda: self.attempt(self._click_launch), description="Launch")
        self.stop_button = Button(
            lambda: self.attempt(self._click_stop), description="Stop", disabled=True, tooltip=IDLE_TIP
        )
        super().__init__()

    @property
    def shown(self) -> dict[str, Any]:
        """What the page shows, as JSON."""
        names = ("description", "tooltip", "disabled")
        buttons = {"launch": self.launch_button, "stop": self.stop_button}
        return {
            "buttons": {key: {name: getattr(button, name) for name in names} for key, button in buttons.items()},
            "status": [self.status_text, self.status_kind],
            "error": self.error,
            "monitor": self.monitor.model_id if self.monitor is not None and self.monitor.comm is not None else "",
        }

    def on_change(self, changed: Callable[[], object]) -> None:
        """Have a function called whenever the page has to change."""
        for part in (self, self.launch_button, self.stop_button):
            part.observe(lambda _: changed())

    @property
    def is_busy(self) -> bool:
        """True while a run is starting or running."""
        return self._stage != "idle"

    def attempt(self, act: Callable[[], object]) -> None:
        """Carry out a click. Show its error here, because no cell would show it."""
        try:
            act()
        except Exception as error:  # an error of any kind is shown
            self.show_error(error)

    def set_ready(self, text: str, *, is_ready: bool, is_news: bool = False) -> None:
        """Describe the launch that a click would start, or the reason why Launch is disabled.

        After a run, its end stays in view until Launch is disabled or the description is news.
        """
        self._ready = text, is_ready
        self._draw_launch_button()
        if not self.is_busy and (self._shows_readiness or is_news or not is_ready):
            self._set_status(text, "ready" if is_ready else "error")
            self._shows_readiness = True

    def show_error(self, error: BaseException) -> None:
        """Show an error as a cell does, but without a traceback if the message alone helps."""
        is_plain = isinstance(error, (CallOrderError, ConfigError))
        self.error = [[f"{type(error).__name__}: {error}" if is_plain else exception_text(error), ""]]

    def take_over(self, old: RunArea) -> None:
        """Take over the run of the area that this one replaces, also a run that is still starting."""
        with old._lock:
            old._successor = self
            stage, run = old._stage, old.run
        if stage == "idle" or not self._begin():
            return
        self._is_successor = True
        if stage != "starting" and run is not None:
            self.receive(run)
        else:
            self._draw_start()  # The thread that starts the run passes it on.

    def show(self) -> None:
        """Note that the panel is shown. Keep a picture below it if its run was started by another panel."""
        self._is_shown = True
        if self._is_successor and self.is_busy:
            self._keep_picture_at_home()

    def _keep_picture_at_home(self) -> None:
        with cell.answering(self.home):
            self._keep_picture(self.monitor)

    def _keep_picture(self, monitor: Monitor | None) -> None:
        sink = make_sink()
        if monitor is not None and sink.is_cell:
            monitor.keep_picture(sink)

    def close(self) -> None:
        """Close the monitor; the run continues."""
        if self.monitor is not None:
            self.monitor.close()

    def launch(self, start: Callable[[], Run]) -> Run:
        """Launch in this thread. Raise `CallOrderError` during another run."""
        if self._successor is not None:
            return self._successor.launch(start)
        if not self._begin():
            raise CallOrderError(
                "this panel's run is not over. Wait for it with panel.run.wait(), or stop it with panel.run.stop()."
            )
        try:
            return self._launch(start)
        except BaseException:
            self.could_not_start()
            raise

    def _click_launch(self) -> None:
        if not self._ready[1] or not self._begin():
            return
        self._draw_start()
        threading.Thread(target=self._launch_in_thread, name="notebook-launcher panel", daemon=True).start()

    def _launch_in_thread(self) -> None:
        # If the panel was never shown, it has no cell; the run then writes to the cell whose code clicked.
        with cell.answering(self.home):
            try:
                self._launch(self._start)
            except BaseException as error:  # no cell would show it
                self.could_not_start(error)

    def _begin(self) -> bool:
        """Reserve the area for a launch. Return False during another run."""
        with self._lock:
            if self.is_busy:
                return False
            self._stage = "starting"
            self._is_successor = False
            return True

    def _launch(self, start: Callable[[], Run]) -> Run:
        self._draw_start()
        run = start()
        self.receive(run)
        return run

    def receive(self, run: Run) -> None:
        """Follow a run that has started: here or, if this panel was replaced, in the successor."""
        with self._lock:
            self.run, self._stage = run, "running"
            successor = self._successor
        if successor is not None:
            successor.receive(run)
        else:
            self.attempt(lambda: self._follow(run))
        run.add_done_callback(lambda _: self._over(run))

    def could_not_start(self, error: BaseException | None = None) -> None:
        """Become idle after a failed start: here or, if this panel was replaced, in the successor."""
        with self._lock:
            self._stage, successor = "idle", self._successor
        if successor is not None:
            successor.could_not_start(error)
            return
        if error is not None:
            self.show_error(error)
        self._draw_end("Nothing was started.", "error")

    def _follow(self, run: Run) -> None:
        num = len(run.ranks)
        self._set_status(f"{run.name} is running on {plural(num, 'rank')}.", "busy")
        self.stop_button.disabled, self.stop_button.tooltip = False, STOP_TIP
        self._draw_launch_button()
        if run.state == "stopping" and self._begin_stopping() is not None:
            self._draw_stopping()
        old, self.monitor = self.monitor, Monitor(run)
        if not self._is_successor:
            self._keep_picture(self.monitor)
        elif self._is_shown:
            self._keep_picture_at_home()
        if old is not None:
            old.close()
        if self._successor is not None:  # The panel was replaced meanwhile.
            self.monitor.close()

    def _click_stop(self) -> None:
        if self.run is None or self.run.wait(0) or (is_second := self._begin_stopping()) is None:
            return
        self._draw_stopping()
        self.run.stop(wait=False, at_once=is_second)

    def _begin_stopping(self) -> bool | None:
        """Note that the run is being stopped. Return True if this was known, None if no run goes on."""
        with self._lock:
            if self._stage not in ("running", "stopping"):
                return None
            was_known, self._stage = self._stage == "stopping", "stopping"
            return was_known

    def _over(self, run: Run) -> None:
        with self._lock:
            self._stage = "idle"
        if self._successor is not None:
            return
        error = run.exception(0)
        seconds = format_seconds(run.snapshot().seconds)
        if error is None:
            self._draw_end(f"{run.name}: done in {seconds}. panel.results has the ranks' results.", "done")
        elif isinstance(error, RunStoppedError):
            self._draw_end(f"{run.name}: stopped after {seconds}.", "done")
        else:
            self.attempt(lambda: self.show_error(error))
            self._draw_end(f"{run.name}: failed after {seconds}.", "error")
        if self.monitor is not None:
            self.attempt(self.monitor.finish)

    def _draw_start(self) -> None:
        self.error = []
        self._draw_launch_button()
        self._set_status("Starting.", "busy")

    def _draw_stopping(self) -> None:
        self.stop_button.description, self.stop_button.tooltip = "Kill", KILL_TIP
        self._set_status("Stopping the ranks. Kill ends them at once.", "busy")

    def _draw_end(self, text: str, kind: str) -> None:
        self._set_status(text, kind)
        self.stop_button.disabled = True
        self.stop_button.description, self.stop_button.tooltip = "Stop", IDLE_TIP
        self._draw_launch_button()

    def _draw_launch_button(self) -> None:
        text, is_ready = self._ready
        self.launch_button.disabled = self.is_busy or not is_ready
        self.launch_button.tooltip = BUSY_TIP if self.is_busy else LAUNCH_TIP if is_ready else text

    def _set_status(self, text: str, kind: str) -> None:
        mark = {"error": "✕ ", "done": "✓ ", "busy": "● "}.get(kind, "")
        self._shows_readiness = False
        self.status_kind, self.status_text = kind, mark + text


# --------------------------------------------------------------------------------------------------------------------
# An exception as a cell shows it.


CONTROLS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x1b[^\[]|[\x00-\x08\x0b-\x1f]")


def exception_text(error: BaseException) -> str:
    """Return the traceback that the running shell would print, without colours; without a shell, Python's.

    Of a failed run, it has one line in place of the rank's traceback, which the monitor has.
    """
    text = _text(error)
    failures = getattr(error, "failures", None)  # Perhaps an attribute of the user's own.
    first = failures[0] if isinstance(failures, tuple) and failures else None
    if isinstance(first, Failure) and first.traceback.strip():
        text = text.replace(first.traceback.rstrip(), first.summary)
    return CONTROLS.sub("", text).strip()


def _text(error: BaseException) -> str:
    if isinstance(error.__cause__, RemoteTraceback):
        return str(error.__cause__)  # It is complete: a cell would add the frames that raised it in the kernel.
    if (render := getattr(error, "_render_traceback_", None)) is not None:
        return "\n".join(render())
    shell = running_shell()
    if shell is not None:
        try:
            lines = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
            return str(shell.InteractiveTB.stb2text(lines))
        except Exception:  # noqa: S110 - an error of the shell must not hide this one
            pass
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
