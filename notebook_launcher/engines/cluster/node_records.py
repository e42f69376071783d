"""The records that the kernel and the agent of a node send to each other, over the link between them.

    kernel -> agent    Join, LookForFile, Modules, StartTree, ParcelChunk, ToRank, Signal, Replace, KillSupervisor,
                       BoardWrite, AskStacks, FinishTree, CloseTree, Ping
    agent -> kernel    Joined, FileSeen, Happened, BoardWritten, StacksAnswered, TreeClosed, Pong, Beat

Before them, the agent describes itself in a line of text (`connections.py`). `tree` numbers the trees of a
kernel, because records of a tree that was closed may still be under way.

All are named tuples: the kernel unpickles thousands a second, and takes three times as long for a frozen dataclass.
"""

from __future__ import annotations

import itertools
import pickle
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from notebook_launcher.engines.board import LIVE
from notebook_launcher.engines.engine import FromRank, Output, Woken
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_launcher.engines.board import Pulse


# kernel -> agent


class Join(NamedTuple):
    """Take a place among the nodes: bind the store's socket to this address, and start the fork server."""

    address: str
    interface: str


class LookForFile(NamedTuple):
    """Ask if there is a file of this path; answered by `FileSeen`."""

    path: str


class Modules(NamedTuple):
    """Let the ranks of the next tree import from this archive, after everything else."""

    archive: bytes


class StartTree(NamedTuple):
    """Start ranks. `setup.environ` holds what is added to the node's own environment."""

    tree: int
    setup: messages.Setup
    imports: messages.Imports | None = None
    """What the kernel has imported since the last tree: the node's fork server imports what it finds of it."""


class ParcelChunk(NamedTuple):
    """A part of the parcel of the next call; the first part replaces the parcel before."""

    data: bytes
    is_first: bool


class ToRank(NamedTuple):
    """Pass a record on to a rank."""

    rank: int
    record: Any
    has_parcel: bool


class Signal(NamedTuple):
    """Send a signal to these ranks."""

    ranks: tuple[int, ...]
    signum: int


class Replace(NamedTuple):
    """Start a rank again."""

    rank: int


class KillSupervisor(NamedTuple):
    """Kill the supervisor, and its ranks with it."""


class BoardWrite(NamedTuple):
    """Write bytes to the board."""

    at: int
    data: bytes
    epoch: int
    """Number of times that the whole board was written; the agent's states name the write to which they belong."""
    number: int = 0
    """If not 0, answered by `BoardWritten`."""


class AskStacks(NamedTuple):
    """Call a method of the tree's `StackFiles`; answered by `StacksAnswered`."""

    number: int
    method: Literal["dump", "sizes", "read", "request"]
    args: tuple[Any, ...] = ()


class FinishTree(NamedTuple):
    """Have all ranks exit that are idle; answered by `TreeClosed` once all have exited and none is left behind."""


class CloseTree(NamedTuple):
    """Kill and reap the remaining processes; answered by `TreeClosed`."""


class Ping(NamedTuple):
    """Answer at once; sent every second that nothing else is, so that the agent notices that the kernel is gone."""

    time: float


# agent -> kernel


class Joined(NamedTuple):
    """The socket of the next store is bound to this port."""

    port: int


class FileSeen(NamedTuple):
    """The answer to `LookForFile`."""

    path: str
    is_there: bool


class Beat(NamedTuple):
    """The node lives; sent every second, whether or not the kernel has time to ask."""


class Carried(NamedTuple):
    """An event with descriptors whose files were read; a part of `Happened`."""

    rank: int
    record: Any
    blobs: tuple[bytes, ...]


class NodeState(NamedTuple):
    """State of a node's ranks as seen from outside; a part of `Happened`."""

    epoch: int
    """As in the last `BoardWrite`."""
    has_safepoint: bool
    cooperative: bytes
    """The bytes of the node's ranks, which are consecutive, from COOPERATIVE on; `activities` has the same order."""
    activities: bytes
    memory: dict[int, int]
    pulses: dict[int, Pulse]


class Happened(NamedTuple):
    """Events of a tree, as `packed_events` packs them, and the state of its ranks if that is due."""

    tree: int
    events: tuple[Any, ...]
    state: NodeState | None = None


class BoardWritten(NamedTuple):
    """All ranks of the node see what a `BoardWrite` wrote, when they look."""

    tree: int
    number: int


class StacksAnswered(NamedTuple):
    """The answer to an `AskStacks`."""

    number: int
    value: Any


class TreeClosed(NamedTuple):
    """No process of the tree is left; the socket of the next store is bound to this port."""

    tree: int
    port: int


class Pong(NamedTuple):
    """The answer to a `Ping`."""

    time: float
    """As in the `Ping`, by the kernel's clock."""
    here: float
    """Time of the answer by the node's clock."""


# --------------------------------------------------------------------------------------------------------------------
# Events on their way from an agent to the kernel: packed, and many at once.
#
# Training ranks cause the same few kinds many times a second: output, metrics, progress, phases. The last three travel
# as `LiveRecords`. All are calm, as are the start of a rank and of its call: they wait a moment for others. All other
# events are urgent: they go at once, behind calm events that wait.


HOLD = 0.05
"""Seconds for which a calm event waits for others."""


class HeldEvents:
    """The events that an agent has not sent yet, in their order."""

    def __init__(self) -> None:
        self._events: list[Any] = []
        self._due = float("inf")
        """Time at which they are to be sent."""

    def add(self, events: Iterable[Any], now: float, *, are_calm: bool = False) -> None:
        """Add events, or what carries them; with `are_calm` all may wait."""
        for event in events:
            if isinstance(event, Woken):
                continue
            record = event.record if isinstance(event, FromRank) else event
            is_calm = are_calm or isinstance(record, (Output, messages.RankStarted, messages.CallStarted, *LIVE))
            self._events.append(event)
            self._due = min(self._due, now + HOLD if is_calm else now)

    def next_due(self, now: float) -> float:
        """Return the seconds until there is something to send; infinity: nothing waits."""
        return max(0.0, self._due - now)

    def take(self) -> tuple[Any, ...]:
        """Return all events, with pickled live records in their places, and forget them."""
        taken: list[Any] = []
        for is_live, group in itertools.groupby(
            self._events, key=lambda event: isinstance(event, FromRank) and isinstance(event.record, LIVE)
        ):
            events = list(group)
            taken += [pickle.dumps([(event.rank, event.record) for event in events])] if is_live else events
        self._events, self._due = [], float("inf")
        return tuple(taken)
