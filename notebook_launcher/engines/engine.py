"""Engines: the machines on which a launch's ranks run, when these are not the kernel's own."""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from notebook_launcher.engines.board import LiveRecords
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.engines.cluster.cluster_tree import ClusterTree
    from notebook_launcher.engines.cluster.command_engines import CommandEngine
    from notebook_launcher.engines.cluster.ray_engine import Ray
    from notebook_launcher.engines.process_tree import ProcessTree

    Engine: TypeAlias = CommandEngine | Ray
    """Machines that ranks can run on, as a value: frozen, printable, checked when it is made."""
    Tree: TypeAlias = ProcessTree | ClusterTree
    """Ranks, and what started them: carries records in both directions, and turns all that arrives into events. A tree
    is mechanism only: `kernel/` decides what the events mean, and does not know which tree it has."""


_DEADLINE: contextvars.ContextVar[Callable[[], float]] = contextvars.ContextVar("start deadline")


@contextlib.contextmanager
def starting_until(deadline: Callable[[], float]) -> Iterator[None]:
    """Let machines that are started in this block come up until a time, which `deadline` returns again and again."""
    token = _DEADLINE.set(deadline)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def start_deadline() -> float:
    """Return the time by `time.monotonic()` until which a machine may come up; infinity: as long as it takes."""
    deadline = _DEADLINE.get(None)
    return math.inf if deadline is None else deadline()


# --------------------------------------------------------------------------------------------------------------------
# The events that the process tree reports to the run's thread.


Stream = Literal["stdout", "stderr"]


class Output(NamedTuple):
    """Bytes that a rank wrote to its standard output or error."""

    rank: int
    stream: Stream
    data: bytes


class FromRank(NamedTuple):
    """A record from a rank; the receiver of the event owns the descriptors."""

    rank: int
    record: Any
    fds: list[int]

    def close(self) -> None:
        """Close the descriptors of an event that nothing takes."""
        for fd in self.fds:
            os.close(fd)


class RankLost(NamedTuple):
    """A rank's process has exited, and all its output has been read."""

    exited: messages.RankExited


class SupervisorLost(NamedTuple):
    """The supervisor is gone; `reason` is what it wrote to its standard error, empty if nothing."""

    reason: str


class NodeLost(NamedTuple):
    """A node is gone, with all of its ranks."""

    node: str
    """The node in a few words: its number, host and address."""
    ranks: tuple[int, ...]
    reason: str
    """The sign by which the loss was noticed."""


class Woken(NamedTuple):
    """Another thread called `wake`."""


Event = (
    Output
    | FromRank
    | LiveRecords
    | RankLost
    | SupervisorLost
    | NodeLost
    | Woken
    | messages.RankStarted
    | messages.RankNotStarted
)
