"""The output of a detached run in a cell that is attached: the host's journal, shown on the cell's sink."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import TYPE_CHECKING

from notebook_launcher.detached.host_socket import HostConnection, HostSilentError
from notebook_launcher.detached.kept_output import read_output
from notebook_launcher.detached.requests import Follow
from notebook_launcher.errors import CallOrderError
from notebook_launcher.history.host_files import SOCKET
from notebook_launcher.kernel.display.sink import make_sink

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.detached.attached_questions import AttachedQuestions
    from notebook_launcher.detached.requests import Entry, News
    from notebook_launcher.kernel.calls.call_scope import TakesDisplay
    from notebook_launcher.kernel.display.sink import Sink

__all__ = ["AttachedOutput", "follow"]

PATIENCE = 0.5
"""Seconds after which the host answers even if there is no output, which bounds the age of the line of progress."""


class AttachedOutput:
    """Shows the journal of a run's host. Create it in the thread whose cell gets the output.

    Args:
        folder: The run's folder.
        config: The run's options.
        since: Age in seconds of the oldest output that is shown; None: all output.
        displays: Takes rich output that a cell on ranks shows at its end.
        socket_name: Name of the host's socket in the folder.
    """

    def __init__(
        self,
        folder: Path,
        config: LaunchConfig,
        since: float | None,
        displays: TakesDisplay | None = None,
        *,
        socket_name: str = SOCKET,
    ) -> None:
        self._folder = folder
        self._socket_name = socket_name
        self._displays = displays
        self._sink = make_sink()
        self._has_headlines = config.output != "none"
        self._shows_progress = config.monitor is not False and self._has_headlines and not self._sink.has_audience
        """True if a line of progress is wanted, because no view shows the progress."""
        self._picture_from = math.inf
        """Earliest time, by `time.monotonic()`, at which a picture instead of a line shows the end of the run."""
        self.last_line = ""
        """The run's last line, if the picture is to show it."""
        self.is_raised = False
        """True if the cell raises the exception with which the run fails."""
        self._from = -math.inf if since is None else time.time() - since
        self._is_detached = False

    @property
    def sink(self) -> Sink:
        """The cell or terminal that gets the output."""
        return self._sink

    def show_progress(self, *, on: bool) -> None:
        """Show a line of progress from now on, because no view shows the progress; or show none."""
        self._shows_progress = on

    def use_picture_from(self, moment: float) -> None:
        """Show the end of the run by a picture instead of a line, from a time by `time.monotonic()` on."""
        self._picture_from = moment

    def follow(self, questions: AttachedQuestions) -> None:
        """Show what comes until the run is over or its host is gone; call it in a thread."""
        position = 0
        for news in follow(self._folder, questions, 0, self._socket_name):
            position = self._take(news, position)
            if news.is_over:
                return
        if (kept := read_output(self._folder, position)) is not None:
            self._take(kept, position)

    def _take(self, news: News, position: int) -> int:
        """Show news after a position; return the next position."""
        if self._is_detached:
            return position
        if news.num_left_out and not position and self._from == -math.inf:
            self.say("earlier output is left out here; run.logs(rank) has all of it")
        for entry in news.entries:
            if entry.time >= self._from:
                self._show(entry)
        self._sink.status(news.status if self._shows_progress else "")
        return news.position

    def _show(self, entry: Entry) -> None:
        # A closed pipe or file must not end the thread that waits for the run.
        with contextlib.suppress(Exception):
            match entry.method, entry.args:
                case "text", (stream, text):
                    self._sink.text(stream, text)
                case "divert", (rank, record):
                    if self._displays is not None:
                        self._displays(rank, record)
                case "clear_output", (wait,):
                    self._sink.clear_output(wait=wait)
                case kind, (data, metadata, transient):
                    self._sink.display(data, metadata, transient, update=kind == "update")

    def say(self, line: str) -> None:
        """Show one line of the launcher's own."""
        with contextlib.suppress(Exception):
            self._sink.text("stdout", f"{line}\n")

    def end(self, line: str) -> None:
        """Show the run's last line, or leave it to the picture."""
        if self._is_detached or not self._has_headlines:
            line = ""
        if line and time.monotonic() < self._picture_from:
            self.say(line)
        else:
            self.last_line = line
        with contextlib.suppress(Exception):
            self._sink.close()

    def detach(self) -> None:
        """Show nothing more, because the cell has ended; the run continues."""
        self._is_detached = True
        with contextlib.suppress(Exception):
            self._sink.close()


def follow(
    folder: Path, questions: AttachedQuestions, position: int = sys.maxsize, socket_name: str = SOCKET
) -> Iterator[News]:
    """Yield a host's news after a position until the run is over or the host is gone; with no position, none.

    What the ranks ask goes to `questions`.
    """
    with contextlib.suppress(OSError, CallOrderError), contextlib.closing(_connect(folder, socket_name)) as connection:
        while True:
            request = Follow(
                position=position, patience=PATIENCE, asked=questions.keys, can_answer=questions.can_answer
            )
            news = connection.ask(request)
            questions.note(news.questions)
            yield news
            if news.is_over:
                return
            position = max(position, news.position)


def _connect(folder: Path, socket_name: str) -> HostConnection:
    """Connect to a host, however long it is silent: it is not dead, and its run's limit or a user lets it go on."""
    while True:
        with contextlib.suppress(HostSilentError):
            return HostConnection(folder, socket_name)
