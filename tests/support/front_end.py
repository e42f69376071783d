"""A front end with a view of a monitor, which a test plays: it says hello and clicks while the cell is busy."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.warm_kernels import PATIENCE, evaluate, final, unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.kernels import Kernel, Outcome

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

TRAIN = """
from notebook_launcher.widgets import Monitor
def train(steps=10_000):
    for step in track(range(steps)):
        time.sleep(0.01)
        report(step=step, loss=1 / (step + 1))
"""

LEFTOVERS = """
import comm
from ipywidgets.widgets import widget
from notebook_launcher.kernel.comms import tap
k = get_ipython().kernel
on_recv = k.shell_stream._recv_callback
[len(comm.get_comm_manager().comms), len(widget._instances), len(tap._TAPS), "Tap" in repr(on_recv)]
"""

FORGET = """
from notebook_launcher.widgets.place import open_widgets
for widget_ in open_widgets():
    if getattr(widget_, "explorable_since", 0): widget_.close()
"""


@contextlib.contextmanager
def clean(kernel: Kernel) -> Iterator[None]:
    """Check that no widget, comm or tap is left, nor anything else."""
    with unchanged(kernel):
        before = evaluate(kernel, LEFTOVERS)
        yield
        after, end = None, time.monotonic() + PATIENCE
        while after != before and time.monotonic() < end:  # The monitor of a run without a waiting cell may be closing.
            kernel.execute(FORGET)
            after = evaluate(kernel, LEFTOVERS)
        assert after == before == [*before[:2], 0, False]


@pytest.fixture(name="kernel")
def clean_kernel(module_kernel: Kernel) -> Iterator[Kernel]:
    """The kernel of a test file, which each test leaves without widgets."""
    with clean(module_kernel):
        yield module_kernel


@dataclasses.dataclass
class Page:
    """A played page: a view of a monitor, whose messages the test sends."""

    kernel: Kernel
    cell: str
    comm_id: str

    @classmethod
    def opened(cls, kernel: Kernel, code: str, *, allow_stdin: bool = True) -> Page:
        """Start a cell, and wait until it shows a monitor."""
        cell = kernel.start(code, allow_stdin=allow_stdin)
        outcome = kernel.wait(cell, until=lambda outcome: bool(views(outcome)) or finished(outcome))
        assert views(outcome), outcome
        return cls(kernel, cell, views(outcome)[0])

    def send(self, kind: str, page: str = "", *, subshell_id: str | None = None, **content: Any) -> None:
        header = {} if subshell_id is None else {"subshell_id": subshell_id}
        message = {"method": "custom", "content": {"type": kind, "page": page, **content}}
        self.kernel.send_comm(self.comm_id, message, **header)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Messages to the page, in order."""
        return [message["content"]["data"]["content"] for message in self._received]

    @property
    def times(self) -> list[float]:
        return [message["header"]["date"].timestamp() for message in self._received]

    @property
    def _received(self) -> list[dict[str, Any]]:
        return [
            message
            for message in self.kernel.received
            if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == self.comm_id
        ]

    @property
    def is_closed(self) -> bool:
        closed = (message for message in self.kernel.received if message["msg_type"] == "comm_close")
        return any(message["content"]["comm_id"] == self.comm_id for message in closed)

    def until(self, met: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        self.kernel.wait(self.cell, until=lambda _: met(self.messages))
        return self.messages


def executed(kernel: Kernel, code: str) -> Outcome:
    """Run a cell, which must not raise, as a front end does, which can ask for input."""
    outcome = kernel.wait(kernel.start(code, allow_stdin=True))
    assert outcome.error is None, outcome.traceback
    return outcome


def views(outcome: Outcome) -> list[str]:
    """Return the models that a cell's displays show."""
    bundles = [content["data"] for content in outcome.of("display_data", "execute_result")]
    return [bundle[WIDGET_VIEW]["model_id"] for bundle in bundles if WIDGET_VIEW in bundle]


def finished(outcome: Outcome) -> bool:
    told = outcome.stdout + str(outcome.displays)
    return outcome.error is not None or "done in" in told or ": done, " in told


def picture_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the tables and the drawing that a run has left: where its monitor was, else at the end of its cell."""
    replaced = [data for data in final(outcome).values() if data["text/plain"]]
    return replaced or [content["data"] for content in outcome.displays[-2:]]


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


def last_steps(messages: list[dict[str, Any]]) -> list[int]:
    """Return how far the first curve has come with each message that draws it."""
    drawn = [message["plots"][0]["lines"][0]["x"] for message in messages if message.get("plots")]
    return [max(steps) for steps in drawn if steps]
