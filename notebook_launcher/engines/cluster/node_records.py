"""The records that the kernel and the agent of a node send to each other, over the link between them.

    kernel -> agent    Join, LookForFile, Modules, StartTree, ParcelChunk, ToRank, Signal, Replace, KillSupervisor,
                       BoardWrite, AskStacks, FinishTree, CloseTree, Ping
    agent -> kernel    Joined, FileSeen, Happened, BoardWritten, StacksAnswered, TreeClosed, Pong, Beat

Before them, the agent describes itself in a line of text (`greeting.py`). `tree` numbers the trees of a kernel, because
records of a tree that was closed may still be under way.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from notebook_launcher.messaging import messages

__all__ = [
    "AskStacks",
    "Beat",
    "BoardWrite",
    "BoardWritten",
    "Carried",
    "CloseTree",
    "FileSeen",
    "FinishTree",
    "Happened",
    "Join",
    "Joined",
    "KillSupervisor",
    "LookForFile",
    "Modules",
    "NodeState",
    "ParcelChunk",
    "Ping",
    "Pong",
    "Replace",
    "Signal",
    "StacksAnswered",
    "StartTree",
    "ToRank",
    "TreeClosed",
]


# kernel -> agent


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """Take a place among the nodes: bind the store's socket to this address, and start the fork server."""

    address: str
    interface: str


@dataclasses.dataclass(frozen=True, slots=True)
class LookForFile:
    """Ask if there is a file of this path; answered by `FileSeen`."""

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Modules:
    """Let the ranks of the next tree import from this archive, after everything else."""

    archive: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class StartTree:
    """Start ranks. `setup.environ` holds what is added to the node's own environment."""

    tree: int
    setup: messages.Setup
    imports: messages.Imports | None = None
    """What the kernel has imported since the last tree: the node's fork server imports what it finds of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParcelChunk:
    """A part of the parcel of the next call; the first part replaces the parcel before."""

    data: bytes
    is_first: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ToRank:
    """Pass a record on to a rank."""

    rank: int
    record: Any
    has_parcel: bool
    """True if the parcel goes with the record."""


@dataclasses.dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to these ranks."""

    ranks: tuple[int, ...]
    signum: int


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """Start a rank again."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class KillSupervisor:
    """Kill the supervisor, and its ranks with it."""


@dataclasses.dataclass(frozen=True, slots=True)
class BoardWrite:
    """Write bytes to the board."""

    at: int
    data: bytes
    epoch: int
    """Number of times that the whole board was written; the agent's states name the write to which they belong."""
    number: int = 0
    """If not 0, answered by `BoardWritten`."""


@dataclasses.dataclass(frozen=True, slots=True)
class AskStacks:
    """Call a method of the tree's `StackFiles`; answered by `StacksAnswered`."""

    number: int
    method: Literal["dump", "sizes", "read", "request"]
    args: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FinishTree:
    """Have all ranks exit that are idle; answered by `TreeClosed` once all have exited and none is left behind."""


@dataclasses.dataclass(frozen=True, slots=True)
class CloseTree:
    """Kill and reap the remaining processes; answered by `TreeClosed`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ping:
    """Answer at once; sent every second that nothing else is, so that the agent notices that the kernel is gone."""

    time: float


# agent -> kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """The socket of the next store is bound to this port."""

    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class FileSeen:
    """The answer to `LookForFile`."""

    path: str
    is_there: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """The node lives; sent every second, whether or not the kernel has time to ask."""


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """An event with descriptors whose files were read; a part of `Happened`."""

    rank: int
    record: Any
    blobs: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NodeState:
    """State of a node's ranks as seen from outside; a part of `Happened`."""

    epoch: int
    """As in the last `BoardWrite`."""
    has_safepoint: bool
    """As on the node's board."""
    cooperative: bytes
    """The bytes of the node's ranks, which are consecutive, from COOPERATIVE on; `activities` has the same order."""
    activities: bytes
    memory: dict[int, int]
    """By rank, in bytes."""
    pulses: dict[int, tuple[bool, int, int]]
    """By rank: the fields of its `Pulse`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return NodeState, tuple([getattr(self, name) for name in self.__slots__])


@dataclasses.dataclass(frozen=True, slots=True)
class Happened:
    """Events of a tree, as `packed_events` packs them, and the state of its ranks if that is due."""

    tree: int
    events: tuple[Any, ...]
    state: NodeState | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The kernel unpickles thousands a second, and takes three times as long for a frozen dataclass by itself.
        return Happened, (self.tree, self.events, self.state)


@dataclasses.dataclass(frozen=True, slots=True)
class BoardWritten:
    """All ranks of the node see what a `BoardWrite` wrote, when they look."""

    tree: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class StacksAnswered:
    """The answer to an `AskStacks`."""

    number: int
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class TreeClosed:
    """No process of the tree is left; the socket of the next store is bound to this port."""

    tree: int
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a `Ping`."""

    time: float
    """As in the `Ping`, by the kernel's clock."""
    here: float
    """Time of the answer by the node's clock."""
