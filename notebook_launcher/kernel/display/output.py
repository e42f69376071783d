"""The output of a run, from the console, which orders the ranks' lines, to the cell or the terminal."""

from __future__ import annotations

import contextlib
import linecache
import sys
import textwrap
import time
import traceback
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.engine import Output
from notebook_launcher.kernel.display.cell import is_repeated
from notebook_launcher.kernel.display.console import Console, Status, Text
from notebook_launcher.kernel.display.sink import ShownOutput
from notebook_launcher.messaging import messages
from notebook_launcher.travel import cells
from notebook_launcher.wording import one_line as in_one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.engines.engine import Event, Stream
    from notebook_launcher.kernel.calls.call_scope import TakesDisplay
    from notebook_launcher.kernel.display.sink import Sink
    from notebook_launcher.messaging.messages import ExceptionReport, Frame


class RunOutput(ShownOutput):
    """The output of one run, on its way to the sink.

    `kept_in`: an expression for the lines that do not stay in a cell, such as `run.logs(rank)`. `displays`: takes each
    rank's rich output in place of the cell, and returns False for what the cell is to show; None: the cell shows the
    displays of `LaunchConfig.display`. `nodes`: by rank, the name of its machine; empty if there is one.
    """

    def __init__(
        self,
        sink: Sink,
        config: LaunchConfig,
        num_processes: int,
        *,
        kept_in: str = "run.logs(rank)",
        displays: TakesDisplay | None = None,
        nodes: Sequence[str] = (),
    ) -> None:
        super().__init__(sink, config)
        self._num_processes = num_processes
        self.console = Console(
            num_processes,
            config.output,
            kept_in=kept_in if self.sink.is_cell else None,
            nodes=nodes,
            is_brief=self.sink.is_brief,
        )
        """Turns the ranks' text into messages for the sink."""
        self.logs = self.console.logs
        """By rank: its whole output; any thread may read it."""
        self.order = self.console.order
        """The order in which the newest output of all ranks arrived."""
        self._displays = displays
        """Decides about rich output in place of `config.display`."""
        self._display = config.display if displays is None else "all"
        """The ranks whose rich output is shown: "all", "rank0" or "none"."""

    def choose_widget_ranks(self, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the ranks whose widgets the cell shows: the wanted ranks; None: the ranks of the option `display`."""
        if not self.sink.takes_comms:
            return ()
        if wanted is not None:
            return wanted
        return {"all": tuple(range(self._num_processes)), "rank0": (0,), "none": ()}[self._display]

    @property
    def has_text(self) -> bool:
        """True once any rank has written something."""
        return any(log.is_written for log in self.logs)

    def last_lines(self, rank: int, num_lines: int) -> tuple[str, ...]:
        """Return the last lines of a rank's output."""
        return self.logs[rank].tail(num_lines)

    def notice(self, text: str, stream: Stream = "stdout") -> None:
        """Add one line of the launcher's own."""
        self.console.notice(text, stream)

    def warn(self, text: str) -> None:
        """Publish one line of the launcher's own on standard error, at once."""
        self.notice(text, "stderr")
        self.publish(force=True)

    def headline(self, text: str) -> None:
        """Add one of the run's first or last lines, unless output is off."""
        if self.has_headlines:
            self.console.notice(text)

    def first_lines(self, text: str) -> None:
        """Add the run's first lines, unless output is off or the launch before, in the same cell, had the same."""
        if self.has_headlines and not is_repeated(self.sink.message, text):
            self.console.notice(text)

    def end(self, text: str) -> None:
        """Show the rest of the ranks' output, including unfinished lines, and then the run's last line."""
        self.console.finish()
        if text and time.monotonic() < self.picture_from:
            self.headline(text)
        elif self.has_headlines:
            self.last_line = text
        self.close()

    def progress(self, text: str) -> None:
        """Show the progress of the run in one line that is updated in place."""
        self.console.progress(text if self.shows_progress else "")

    def show(self, rank: int, record: messages.Display | messages.ClearOutput) -> None:
        """Show rich output, if the rank's rich output is shown at all."""
        if self._display == "none" or (self._display == "rank0" and rank != 0):
            return
        if self._displays is not None and self._displays(rank, record):
            return
        self.publish(force=True)
        with contextlib.suppress(Exception):
            if isinstance(record, messages.ClearOutput):
                self.sink.clear_output(wait=record.wait)
                self.console.clear()
            else:
                self.sink.display(record.data, record.metadata, record.transient, update=record.update)

    def next_due(self, now: float) -> float | None:
        """Return the seconds until there is something to publish; None: nothing waits."""
        return self.console.next_due(now)

    def publish(self, *, force: bool = False) -> None:
        """Publish the text that is due; with `force` all text."""
        for message in self.console.take(time.monotonic(), force=force):
            # A closed pipe or file must not fail the run; the logs have the whole output.
            with contextlib.suppress(Exception):
                match message:
                    case Text(stream, text):
                        self.sink.text(stream, text)
                    case Status(text):
                        self.sink.status(text)

    def show_late_output(self, events: list[Event]) -> None:
        """Show text that the ranks write after the run is over, while their session ends."""
        for event in events:
            if isinstance(event, Output):
                self.console.feed(event.rank, event.stream, event.data)
        self.close()

    def close(self) -> None:
        """Publish all text and remove the live area; later output is still accepted."""
        self.console.finish()
        self.publish(force=True)
        self.sink.close()


# --------------------------------------------------------------------------------------------------------------------
# Formats a rank's exception as text, with the source lines of cells, which only the kernel has.


BECAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def format_report(report: ExceptionReport) -> str:
    """Return the traceback in the form in which Python prints it."""
    before = ""
    if report.earlier is not None:
        before = format_report(report.earlier) + (BECAUSE if report.link == "cause" else DURING)
    head = "Traceback (most recent call last):\n" if report.frames else ""
    frames = "".join(traceback.StackSummary.from_list([_summary(frame) for frame in report.frames]).format())
    text = before + head + frames + report.syntax + _last_line(report) + "\n"
    for note in report.notes:
        text += note + "\n"
    for number, member in enumerate(report.group, 1):
        text += f"  +---------------- {number} ----------------\n" + textwrap.indent(format_report(member), "  | ")
    return text


def _last_line(report: ExceptionReport) -> str:
    return f"{report.type_name}: {report.message}" if report.message else report.type_name


def error_line(report: ExceptionReport, limit: int = 200) -> str:
    """Return an exception in one line: `ValueError: boom`."""
    return in_one_line(_last_line(report), limit)


def one_line_of(error: BaseException, limit: int = 200) -> str:
    """Return an exception of this process in one line: `ValueError: boom`."""
    return in_one_line("".join(traceback.format_exception_only(type(error), error)), limit)


def _summary(frame: Frame) -> traceback.FrameSummary:
    line = frame.line or linecache.getline(frame.filename, frame.lineno)
    extra: dict[str, Any] = {}
    if sys.version_info >= (3, 11) and not frame.line and frame.colno is not None:
        extra = {"end_lineno": frame.end_lineno, "colno": frame.colno, "end_colno": frame.end_colno}
    return traceback.FrameSummary(
        cells.shown_file(frame.filename), frame.lineno, frame.name, lookup_line=False, line=line, **extra
    )
