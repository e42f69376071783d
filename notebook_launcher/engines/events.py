"""The events that the process tree reports to the run's thread."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from notebook_launcher.engines.live_records import LiveRecords
from notebook_launcher.messaging import messages

__all__ = ["Event", "FromRank", "NodeLost", "Output", "RankLost", "Stream", "SupervisorLost", "Woken"]

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
