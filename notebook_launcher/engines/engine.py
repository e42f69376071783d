"""Engines: the machines on which a launch's ranks run, when these are not the kernel's own."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from notebook_launcher.engines.board import LiveRecords
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from notebook_launcher.engines.cluster.cluster_tree import ClusterTree
    from notebook_launcher.engines.process_tree import ProcessTree
    from notebook_launcher.machine.allocation import NodeInfo

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


class Engine(Protocol):
    """Machines that ranks can run on, as a value: frozen, printable, checked when it is made."""

    def look(self) -> tuple[NodeInfo, ...]:
        """Return the machines, with their cores and GPUs; raises `ConfigError` if one cannot be used."""

    def start(self, setup: messages.Setup) -> Tree:
        """Start ranks; `setup.environ` holds what is added to each machine's own environment."""


@runtime_checkable
class ReducibleEngine(Engine, Protocol):
    """Engine of which a run can use a part, when machines are gone for good."""

    def without(self, nodes: Collection[int]) -> ReducibleEngine | None:
        """Return the engine of the other nodes, which have the numbers from 0 on; None if there is no other one."""

    def close(self) -> None:
        """End what is kept up between launches."""


# --------------------------------------------------------------------------------------------------------------------
# The events that the process tree reports to the run's thread.


Stream = Literal["stdout", "stderr"]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a rank wrote to its standard output or error."""

    rank: int
    stream: Stream
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class FromRank:
    """A record from a rank; the receiver of the event owns the descriptors."""

    rank: int
    record: Any
    fds: list[int]

    def close(self) -> None:
        """Close the descriptors of an event that nothing takes."""
        for fd in self.fds:
            os.close(fd)


@dataclasses.dataclass(frozen=True, slots=True)
class RankLost:
    """A rank's process has exited, and all its output has been read."""

    exited: messages.RankExited


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisorLost:
    """The supervisor is gone; `reason` is what it wrote to its standard error, empty if nothing."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone, with all of its ranks."""

    node: str
    """The node in a few words: its number, host and address."""
    ranks: tuple[int, ...]
    reason: str
    """The sign by which the loss was noticed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Woken:
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
