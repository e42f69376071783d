"""The protocol of sinks, destinations of a run's output, and the choice of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.display.cell import CellSink
from notebook_launcher.kernel.display.stream_sink import StreamSink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.engines.events import Stream
    from notebook_launcher.messaging import messages

__all__ = ["Sink", "make_sink", "teller"]


class Sink(Protocol):
    """Destination of output; used from any thread."""

    @property
    def is_cell(self) -> bool:
        """True for a cell, which keeps its output; False for a terminal, a file or a variable."""

    @property
    def has_audience(self) -> bool:
        """True for a cell that a person may look at, in a front end that may draw widgets."""

    @property
    def is_brief(self) -> bool:
        """True for a cell that an agent reads, whose output is short."""

    def hold_after_cell(self) -> bool:
        """Where no person looks, hold what comes after the cell's end for the cell that calls `show_here`.

        Return False where a person looks.
        """

    def show_here(self) -> None:
        """Show what was held, and what is to come, in the cell that runs now."""

    def text(self, stream: Stream, text: str) -> None:
        """Append text."""

    def print(self, text: str) -> None:
        """Append text to standard output as the calling code prints, after all output that was sent."""

    def status(self, text: str) -> None:
        """Redraw the live area; an empty text removes it."""

    def display(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        transient: Mapping[str, Any] | None = None,
        *,
        update: bool = False,
    ) -> None:
        """Show rich output, or update the one with the same `display_id`."""

    @property
    def takes_comms(self) -> bool:
        """True if the page of this cell may show widgets."""

    @property
    def message(self) -> Any:
        """The message that started the cell; None without a cell."""

    def comm(self, record: messages.CommMessage) -> None:
        """Send a message of a comm to the page."""

    def html(self, html: str, text: str) -> None:
        """Show HTML, or `text` where there is no HTML."""

    def clear_output(self, *, wait: bool = False) -> None:
        """Clear what is there, at once or when the next output comes."""

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function that publishes, in the thread that publishes, after all earlier output."""

    def flush(self) -> None:
        """Wait until all is sent."""

    def close(self) -> None:
        """Remove the live area; later output is still taken."""


def teller(config: LaunchConfig) -> Callable[[str], None]:
    """Return what shows a line at once, before a run has output of its own; nothing with `output="none"`."""
    return lambda text: None if config.output == "none" else make_sink().print(f"{text}\n")


def make_sink() -> Sink:
    """Return the sink for the output of the calling code; call it in the thread that launches."""
    shell = kernel_shell()
    return StreamSink() if shell is None else CellSink(shell)
