"""`ConfigPanel(train)`: configure a launch, start it, watch it, stop it."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_launcher.config import LaunchConfig
from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.calls.checks import check_callable
from notebook_launcher.kernel.display import cell
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.kernel.launch import launch
from notebook_launcher.machine import devices
from notebook_launcher.widgets.assets import STATIC, join_modules
from notebook_launcher.widgets.launching import launch_state
from notebook_launcher.widgets.launching.launch_state import LaunchState
from notebook_launcher.widgets.panel.running import Button, RunArea
from notebook_launcher.widgets.panel.view import PanelView, product
from notebook_launcher.widgets.place import Kept, PanelCell, open_widgets, panel_html, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.handle import Run
    from notebook_launcher.widgets.monitor.monitor import Monitor


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
