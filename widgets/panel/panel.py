"""`ConfigPanel(train)`: configure a launch, start it, watch it, stop it."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal

import anywidget
import traitlets

from notebook_launcher import tracebacks
from notebook_launcher.config import LaunchConfig
from notebook_launcher.errors import CallOrderError, ConfigError, RemoteTraceback, RunStoppedError
from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.calls.checks import check_callable
from notebook_launcher.kernel.display import cell
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.kernel.failures.culprit import Failure
from notebook_launcher.kernel.launch import launch
from notebook_launcher.machine import devices
from notebook_launcher.widgets.assets import STATIC, join_modules
from notebook_launcher.widgets.launching import launch_state
from notebook_launcher.widgets.launching.launch_state import LaunchState
from notebook_launcher.widgets.monitor.monitor import Monitor
from notebook_launcher.widgets.panel.view import PanelView, product
from notebook_launcher.widgets.place import Kept, PanelCell, open_widgets, panel_html, view_of
from notebook_launcher.wording import format_seconds, plural, without_colours

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.handle import Run


class ConfigPanel(anywidget.AnyWidget):
    """A form for a launch: the options, the function's own parameters, the effective batch, and a button.

        panel = ConfigPanel(train, num_processes=2)
        panel

    `panel.config` is the `LaunchConfig` that the form shows; it can be set, and observed with
    `panel.observe(handler, "config")`. `panel.arguments` maps the function's parameters to the values that were set;
    the mapping can be changed in place. A text that is not a valid value leaves `config` as it was and disables
    Launch, and its field shows what to type. A click on Launch starts a run in the background, so the cell is free.

    Running the panel's cell again replaces the panel. The new panel shows the run of the old one, and can stop it.

    Args:
        fn: The function to launch. None: only `panel.launch(fn)` launches.
        num_processes: The number of ranks, as in `notebook_launch`.
        kwargs: Arguments of `fn` by name.
        config: Options to begin with.
        options: Fields of `LaunchConfig` by name. They replace the options of `config`.

    Raises:
        ConfigError: `fn` is no function, an option is invalid, or `fn` has no parameter with a name in `kwargs`.
    """

    _esm = join_modules(STATIC / "panel.js")
    _css = join_modules(STATIC / "panel.css")
    config = traitlets.Instance(LaunchConfig)
    """The options that the form shows."""
    form = traitlets.Dict().tag(sync=True)
    """The fields and what is written beside them, as the page draws them."""
    running = traitlets.Dict().tag(sync=True)
    """Launch, Stop, the run's state, its error, and the name of its monitor."""
    opened: Any = traitlets.List().tag(sync=True)
    """Sections that are open."""
    folded = traitlets.Bool(False).tag(sync=True)
    """True if one line stands for the fields, as after a launch."""
    relayed = traitlets.Dict().tag(sync=True)
    """Title, script and style of a monitor whose messages go through the panel; empty if it has its own connection."""

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        num_processes: int | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        config: LaunchConfig | None = None,
        **options: Any,
    ) -> None:
        if fn is not None:
            check_callable(fn)
        if num_processes is not None:
            options["num_processes"] = num_processes
        self._state = state = LaunchState(fn, LaunchConfig.build(config, options), kwargs or {}, holder=self)
        self.run_area = RunArea(self._start, self._show_run)
        """Launch, Stop, the run's state and its monitor."""
        self._monitor: Monitor | None = None
        self._kept = Kept()
        self._left: dict[str, Any] | None = None
        """Settings of the panel that this one replaced."""
        self._shows_redefined: bool | None = None
        """True if the form shows that its function was defined again; None before the panel is shown."""
        self.place = PanelCell()
        """The cells that show the panel."""
        super().__init__(config=state.config)
        self.view = PanelView(state)
        """The form: `panel.view.fields["seed"]` is the seed's."""
        self.add_class(self._kept.live)
        state.changed = self._follow
        self.observe(lambda change: setattr(state, "config", change["new"]), "config")
        self.on_msg(lambda _, content, __: self._receive(content))
        self._move_to(cell.current_message())
        self.draw()

    @property
    def fn(self) -> Callable[..., Any] | None:
        """The function that the panel launches."""
        return self._state.function  # type: ignore[no-any-return]

    @property
    def arguments(self) -> Any:
        """Arguments that were set, by name: change them in place, or assign a mapping."""
        return self._state.arguments

    @arguments.setter
    def arguments(self, values: Mapping[str, Any]) -> None:
        self._state.arguments.replace(values)

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why Launch is disabled, by option, by `arguments.<name>`, or by `""`; empty if it is enabled."""
        return dict(self._state.problems)

    @property
    def code(self) -> str:
        """Code for the same launch."""
        return self._state.code()[0]

    @property
    def effective_batch(self) -> int | None:
        """Samples of one optimizer update on all ranks; None if no parameter of the function is its micro-batch."""
        return product(self._state.batch_factors)

    @property
    def run(self) -> Run | None:
        """The newest run; None before the first."""
        return self.run_area.run

    @property
    def results(self) -> Results | None:
        """Values that the newest run's ranks returned; None before its end. Raises the run's error if it failed."""
        run = self.run_area.run
        return run.result() if run is not None and run.wait(0) else None

    @property
    def launch_button(self) -> Button:
        """Button that starts a run; disabled during a run and while a field is wrong. Its tooltip has the reason."""
        return self.run_area.launch_button

    @property
    def stop_button(self) -> Button:
        """Button that stops the run; a second click kills its ranks."""
        return self.run_area.stop_button

    def launch(self, fn: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Run:
        """Launch with the panel's options and return the run at once; the panel shows it.

        Warns if the notebook has defined the panel's function again: the panel has the earlier one.

        Args:
            fn: The function to launch; None: the panel's function, with its arguments.
            args: Positional arguments of `fn`.
            kwargs: Arguments by name. They replace the panel's arguments.

        Raises:
            CallOrderError: The panel's run is not over.
            LaunchError: `notebook_launcher.launch` refuses the launch.
        """
        if fn is None and self._state.is_redefined:
            name = self._state.name
            warnings.warn(
                f"{name} was defined again, and this panel launches the earlier {name}. Run the panel's cell again, or "
                f"call panel.launch({name}).",
                stacklevel=2,
            )
        return self.run_area.launch(lambda: self._start(fn, args, kwargs))

    def __repr__(self) -> str:
        state = "not launched yet" if self.run is None else f"run {self.run.state}"
        return f"<ConfigPanel({self._state.name}): {state}>"

    def close(self) -> None:
        """Close the panel with its monitor; its run continues."""
        if hasattr(self, "_kept"):  # ipywidgets also closes a panel whose constructor has failed.
            self._kept.close()
            self.run_area.close()
        layout = self._trait_values.get("layout")  # asked for by its name, it would be made again
        super().close()
        if layout is not None:
            layout.close()  # It is a widget with a comm of its own.

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Options and arguments that differ from their defaults and can be typed."""
        return launch_state.settings_of(self._state)

    def _follow(self) -> None:
        self.config = self._state.config
        self.draw()

    def draw(self) -> None:
        """Show the state of the launch: what was set from code, mistakes, the effective batch and the code."""
        with self._state.lock:
            self.form = self.view.form()
            if self.comm is not None:  # Another panel has the area once this one is closed.
                self.run_area.set_ready(**self.view.readiness())

    def _receive(self, content: Any) -> None:
        """Process one message from the page: what the user has typed or clicked."""
        area, state = self.run_area, self._state
        match content if isinstance(content, dict) else {}:
            case {"type": "launch"}:
                area.launch_button.click()
            case {"type": "stop"}:
                area.stop_button.click()
            case {"type": "monitor"} if area.monitor is not None:
                area.monitor._handle_custom_msg(content.get("content"), [])  # noqa: SLF001 - the page's message
            case {"type": "put", "key": key, "value": value} if key in self.view.fields:
                area.attempt(lambda: self.view.put(key, value, content.get("at", 0.0)))
            case {"type": "path", "key": key, "value": value} if key in self.view.files:
                self.view.files[key] = value
            case {"type": "look"}:
                self.draw()
            case {"type": "refresh"}:  # The GPUs' free memory changes.
                state.machine = devices.detect()
                state.touch()
            case {"type": "forget"}:
                area.attempt(self.view.forget)
                self.draw()
            case {"type": "load" | "save" | "export" as act}:
                self.view.work_with_file(act)
                self.draw()

    def _show_run(self) -> None:
        """Show the state of the run; its monitor folds the form."""
        area = self.run_area
        if area.monitor is not None and area.monitor is not self._monitor:
            self._monitor, self.folded = area.monitor, True
            if kernel_shell() is None:  # marimo connects widgets with the page that a cell makes, not those of a thread
                area.monitor.send = lambda content: self.send({"type": "monitor", "content": content})
                self.relayed = area.monitor.get_state(["title", "_esm", "_css"])
        self.running = area.shown
        if self._kept.is_shown:
            self._kept.renew(self._picture(), self.code)

    def _start(self, fn: Any = None, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Run:
        # The panel holds the monitor, so the run does not show another one.
        config = LaunchConfig.build(self._state.config, {"monitor": False})
        if fn is not None:
            return launch(fn, args=args, kwargs=kwargs, config=config)
        by_place, by_name = self._state.call()
        run = launch(self.fn, args=args or by_place, kwargs={**by_name, **(kwargs or {})}, config=config)  # type: ignore[arg-type]
        if (path := launch_state.file_of(self.fn, config)) is not None:
            launch_state.write(path, self.settings)
        return run

    def _ipython_display_(self, **_: Any) -> None:
        sink = make_sink()
        if self.comm is None:  # The panel was closed because its cell was run again.
            sink.html(self._picture(), self.code)
            return
        self._move_to(cell.current_message())
        is_first, self._shows_redefined = self._shows_redefined is None, self._state.is_redefined
        if is_first:
            self._call_after_cells()
        if is_first and sink.has_audience:
            self._recall()
        self.draw()  # The cell may have given names to the panel and to other values meanwhile.
        # A notebook that is not trusted shows the empty HTML: the picture below is enough.
        sink.display({**view_of(self), "text/html": "", "text/plain": repr(self)})
        if sink.is_cell:
            self._kept.show(sink, self._picture(), self.code)
        self.run_area.show()

    def _call_after_cells(self) -> None:
        """Show after each cell, until the panel is closed, whether the notebook has defined the function again."""
        # Weakly, because the shell would keep the panel, and with the panel its run.
        shell, reference = kernel_shell(), weakref.ref(self)

        def look(*_: Any) -> None:
            panel = reference()
            if panel is None or panel.comm is None:
                shell.events.unregister("post_run_cell", look)
            elif panel._shows_redefined != panel._state.is_redefined:  # noqa: SLF001 - the same class
                panel._shows_redefined = not panel._shows_redefined  # noqa: SLF001
                panel.draw()

        if shell is not None:
            shell.events.register("post_run_cell", look)

    def _recall(self) -> None:
        """Fill in the settings of the panel that this one replaced, else of the last run."""
        path = launch_state.file_of(self.fn, self.config)
        if self._left is not None:
            self.view.recall(self._left, "As you left the panel")
        elif path is not None and (settings := launch_state.read(path)) is not None:
            self.view.recall(settings, "As in your last run")

    def _picture(self) -> str:
        status = self.run_area.status_text
        if self.run_area.is_busy:  # The page shows the picture once the kernel is gone, and the ranks with it.
            status = f"When this picture was made: {status}"
        return panel_html(self._state.name or "a function", self.view.words(), status, self.code)

    def _move_to(self, message: Any) -> None:
        """Let a cell show this panel, in place of the panel that the cell showed when it was last run."""
        self.run_area.home = message
        if self.place.add(message) and (old := self._find_replaced()):
            self._left = old.settings
            old.close()
            if old.run_area.is_busy and not self.run_area.is_busy:
                self.run_area = old.run_area
                self.run_area.move(self._start, self._show_run, message)

    def _find_replaced(self) -> ConfigPanel | None:
        panels = (widget for widget in open_widgets() if isinstance(widget, ConfigPanel) and widget is not self)
        # The cell may have shown several panels.
        left = [panel for panel in panels if panel.place.is_left_to(self.place)]
        name = self._state.name
        return min(left, key=lambda old: (old.view.state.name != name, not old.run_area.is_busy), default=None)


# --------------------------------------------------------------------------------------------------------------------
# Lower part of the panel: Launch and Stop, the state of the run, and its monitor.


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
