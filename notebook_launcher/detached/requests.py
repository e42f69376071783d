"""What a host and its clients say: a client calls functions of the host by their names.

A host never sends what was not asked for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.kernel.calls.call_scope import CallScope
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.messaging import messages

PROTOCOL = 9
"""Number of this protocol. It changes with every record and with every function that an `Ask` may name; a host and a
client of different numbers part."""


class Ask(NamedTuple):
    """Call a function of the host, or read an attribute of its run."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_descriptor: bool = False
    """True if a descriptor goes with it, which the host asks for by an empty answer; the function's first argument."""


class HostAnswer(NamedTuple):
    """The value of a request, or its exception."""

    value: Any = None
    error: BaseException | None = None

    def open(self) -> Any:
        """Return the value, or raise the exception."""
        if self.error is not None:
            raise self.error
        return self.value


class CallOrder(NamedTuple):
    """A call, as the kernel knows it. Descriptor beside it: the parcel of the call."""

    scope: CallScope
    source: str
    places: dict[str, str]
    """By file name: the kernel's cells as readers know them, `Cell In[3]`."""
    environment: dict[str, Any] | None = None
    """Versions, commit and variables of the kernel; None: the host's own."""


class HostOrder(NamedTuple):
    """Conduct a call, or keep ranks for the calls of clients; the host answers with its folder.

    The kernel sends it once the host has said, by an empty answer, that it is up. Descriptor: the call's parcel.
    """

    plan: Plan
    surroundings: messages.Setup
    """Environment, import path and working directory of the kernel."""
    call: CallOrder | None = None
    """None for a session."""


class SessionState(NamedTuple):
    """A session at one moment."""

    config: LaunchConfig
    num_processes: int
    summary: str
    """Hardware and options in one line."""
    latest: str
    """Folder of the latest call; empty before the first."""
    is_busy: bool
    is_at_rest: bool
    """True if the ranks are up and idle, and their last call did not fail."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PendingQuestion:
    """A question of a rank that waits for an answer."""

    key: int
    rank: int
    prompt: str
    password: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One piece of output: what is called on the sink, and with what."""

    time: float
    """Time by `time.time()`."""
    method: str
    args: tuple[Any, ...]
    size: int = 0
    """About the bytes that it holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Output of a run that a client has not shown yet."""

    entries: tuple[Entry, ...]
    position: int
    num_left_out: int
    """Number of entries that the host had dropped before."""
    status: str
    questions: tuple[PendingQuestion, ...]
    is_over: bool
    """True if the run is over, its ending is in the folder, and no entry follows."""
