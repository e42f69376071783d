"""What the process tree reports to the run's thread."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from notebook_launcher import messages

__all__ = ["Event", "FromRank", "Output", "RankLost", "Stream", "SupervisorLost", "Woken"]

Stream = Literal["stdout", "stderr"]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a rank wrote."""

    rank: int
    stream: Stream
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class FromRank:
    """A record from a rank; whoever takes the event owns the descriptors."""

    rank: int
    record: Any
    fds: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class RankLost:
    """A rank's process has ended and all that it wrote has been read."""

    exited: messages.RankExited


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisorLost:
    """The supervisor is gone; `reason` says why if it never came up."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Woken:
    """Another thread called `wake`."""


Event = Output | FromRank | RankLost | SupervisorLost | Woken | messages.RankStarted | messages.RankNotStarted
