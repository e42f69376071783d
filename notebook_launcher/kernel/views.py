"""The only module of the engine that asks for a view: a run that takes longer than a second shows itself.

The view is imported late: a launch of 40 ms neither imports nor shows anything, and an installation whose
widgets cannot be imported still has its line of progress.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.history.curves import Curves
from notebook_launcher.kernel.comms.tap import poll_tap
from notebook_launcher.kernel.latch import held_interrupts
from notebook_launcher.kernel.run.snapshots import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.kernel.display.sink import ShownOutput, Sink
    from notebook_launcher.kernel.run.handle import AnyRun

HELLO_WITHIN = 3.0
"""Longest wait in seconds for an answer of a front end; JupyterLab takes 0.1 to 0.5 s."""
HELLO_CHECK = 0.5
VSCODE = "vscode-notebook-cell:"
"""Beginning of the name by which VS Code's requests know their cell."""
UNDRAWN = (
    "VS Code has not drawn this run's live monitor, because it did not find a script for widgets. What helps is under "
    "'VS Code' in the guide to VS Code and Colab: docs/how-to/vscode-and-colab.md"
)
DRAWING_BUDGET = 5.0
"""Longest wait in seconds for the picture of a run that is over."""


class RunView:
    """The view that a run shows by itself. The thread that waits for the run drives it, in steps that do not block.

    In a front end that draws widgets, the view is the monitor while the run lasts. At the end it is a picture in the
    same place. If no front end answers, there is a line of progress instead, and a picture below the ranks' output.

    `is_raised`: the cell raises the exception with which the run fails. `is_hidden`: there is no view at all.
    """

    def __init__(self, run: AnyRun, output: ShownOutput, *, is_raised: bool, is_hidden: bool = False) -> None:
        self._run = run
        self._output = output
        self._is_raised = is_raised
        self._monitor: Any = None
        """The monitor; None until the run has lasted QUIET seconds."""
        self._began = time.monotonic()
        config, sink = run.config, output.sink
        self._is_quiet = is_hidden or config.output == "none"
        """True if the run is to show no line of its own."""
        self._told_undrawn = False
        """True once the monitor was found not to be drawn, which one line may say."""
        self._wants_monitor = (sink.is_cell and not is_hidden) and (
            config.monitor is True or (config.monitor == "auto" and sink.has_audience and not self._is_quiet)
        )
        self.is_wanted = self._wants_monitor or (sink.is_cell and config.monitor == "auto" and not self._is_quiet)
        if self.is_wanted:
            output.picture_from = self._began + QUIET

    def step(self) -> float | None:
        """Do what is due; return the seconds until there is more to do, None if there is nothing more."""
        waits = [poll_tap(), self._step_monitor()]
        return min((wait for wait in waits if wait is not None), default=None)

    def _step_monitor(self) -> float | None:
        if not self._wants_monitor:
            return None
        seconds = time.monotonic() - self._began
        if seconds < QUIET:
            return QUIET - seconds
        if self._monitor is None:
            self._show()
        if self._monitor is None:
            return None
        is_unseen = not self._monitor.was_seen
        is_late = is_unseen and seconds > QUIET + HELLO_WITHIN
        self._output.shows_progress = is_late and not self._is_quiet
        if is_late and not self._told_undrawn:
            self._told_undrawn = True
            cell = (self._output.sink.message or {}).get("metadata", {}).get("cellId", "")
            if str(cell).startswith(VSCODE) and not self._is_quiet:
                self._output.sink.text("stdout", f"{UNDRAWN}\n")
        poll: float | None = self._monitor.poll()
        return HELLO_CHECK if poll is None and is_unseen else poll

    def close(self) -> None:
        """Leave a picture of the run in place of the monitor; the monitor of a run that goes on stays live."""
        key = "" if self._monitor is None else self._monitor.finish()
        if self._output.last_line:
            self._leave_picture(self._output.last_line, key)

    def _show(self) -> None:
        try:
            with held_interrupts():
                from notebook_launcher.widgets.monitor.monitor import show_alone

                # The run may have ended during the import, which takes up to a second the first time.
                if not self._run.wait(0):
                    self._monitor = show_alone(self._run, self._output.sink)
        except Exception as error:  # a view that cannot be shown must not end the run
            self._wants_monitor = False
            self._output.shows_progress = not self._is_quiet
            self._output.sink.text("stderr", f"no monitor: {type(error).__name__}: {error}\n")

    def _leave_picture(self, line: str, key: str) -> None:
        from notebook_launcher.kernel.display.cell import final_outputs

        sink = self._output.sink
        try:
            curves = Curves()
            curves.fold(self._run.metrics)
            snapshot, pictures = self._run.snapshot(), self._run.pictures
            options = None if self._monitor is None else self._monitor.plot_options
            bundles = final_outputs(
                line, snapshot, curves, is_raised=self._is_raised, key=key, pictures=pictures, options=options
            )
            for bundle in bundles if self._monitor is None else self._monitor.leave(bundles):
                sink.display(bundle)
        except Exception as error:  # the run's results matter more than its picture
            sink.text("stdout", f"{line}\n")
            sink.text("stderr", f"no picture: {type(error).__name__}: {error}\n")
        sink.flush()


def watch(run: AnyRun, output: ShownOutput) -> LateView | None:
    """Show the view of a run for which no cell waits, from a thread that ends with the run.

    Return what a later cell shows that waits for the run; None if it shows nothing, because the run's own cell does.
    """
    is_held = output.sink.hold_after_cell()
    view, thread = RunView(run, output, is_raised=False), None

    def attend() -> None:
        with contextlib.closing(view):
            while not run.wait(view.step()):
                pass

    if view.is_wanted:
        thread = threading.Thread(target=attend, name=f"notebook-launcher view of {run.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # There is no room for a thread. The run continues without a view.
            output.picture_from = math.inf
            thread = None
    return LateView(output.sink, thread) if is_held else None


class LateView:
    """The output and the view of a run that goes on after its cell is seen no more, for a later cell that waits for it.

    `thread` shows the view; None: there is no view.
    """

    def __init__(self, sink: Sink, thread: threading.Thread | None) -> None:
        self._sink = sink
        self._thread = thread

    def show_during(self, wait: Callable[[], bool]) -> bool:
        """Call a function that waits for the end of the run, and return if the run is over, as it does."""
        if threading.current_thread() is not threading.main_thread():
            return wait()
        self._sink.show_here()
        is_over = wait()
        if is_over and self._thread is not None:
            self._thread.join(DRAWING_BUDGET)
        return is_over
