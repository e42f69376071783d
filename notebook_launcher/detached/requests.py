"""Records between a host and its clients."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.kernel.calls.call_scope import CallScope
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.messaging import messages

PROTOCOL = 8
"""Number of this protocol. It changes with every record and with every method that an `Ask` may name; a host and a
client of different numbers part."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostWaits:
    """The host is up, and waits for its order; its first record. A kernel that was interrupted before gives none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """Conduct this run; the kernel's answer to `HostWaits`. Descriptor: the parcel of the call."""

    plan: Plan
    name: str
    arguments: dict[str, str]
    """The function's arguments in a few words each."""
    source: str
    environment: dict[str, Any]
    """Versions, commit and variables of the kernel."""
    places: dict[str, str]
    """By file name: the kernel's cells as readers know them, `Cell In[3]`."""
    surroundings: messages.Setup
    """Environment, import path and working directory of the kernel."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionOrder:
    """Keep these ranks for the calls of clients; the kernel's answer to the `HostWaits` of a session's host."""

    plan: Plan
    surroundings: messages.Setup
    """Environment, import path and working directory of the kernel."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Begin a call on a session's ranks; answered by `HostReady`. Descriptor, once asked for: the call's parcel."""

    scope: CallScope
    source: str
    places: dict[str, str]
    """As in `HostOrder`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """A session at one moment."""

    config: LaunchConfig
    num_processes: int
    summary: str
    """Hardware and options in one line."""
    started: float
    """Time by `time.time()`."""
    latest: str
    """Folder of the latest call; empty before the first."""
    is_busy: bool
    is_at_rest: bool
    """True if the ranks are up and idle, and their last call did not fail."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostReady:
    """The run has begun, or the session waits for calls; the answer to `HostOrder`, `SessionOrder` and `Begin`."""

    run_id: str
    folder: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Call a method of the run's handle, or read an attribute: see `hosted_run.ANSWERED`.

    Answered, as are the records below, by `Answered` or `RequestRefused`.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerQuestion:
    """Give the answer to a `PendingQuestion`; the value is True if the question still waited for it."""

    key: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TakeResults:
    """Note that the client has opened the results; the value is the run's last snapshot if its folder goes now."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadSession:
    """Read the state of the session; the value is a `SessionState`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenDebugger:
    """Open a debugger in the frames of a rank, or join the debugger that is open."""

    rank: int | None
    """The rank; None: the one that failed first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InterruptDebugger:
    """Leave the debugger at its prompt, or end the command that runs in it."""

    again: bool
    """True to end the rank."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AwaitDebugger:
    """Wait for the end of the debugger; the value is its exception, or None."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForgetFailures:
    """Release what the ranks keep of the last call's failure."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """Stop the running call and end the ranks; the answer comes when they have ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The value of a request."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused:
    """The exception of a request."""

    error: BaseException


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Send what a cell would have shown after a position, at once or when there is something; answered by `News`."""

    position: int
    patience: float
    """Seconds after which the answer comes in any case."""
    asked: tuple[int, ...] = ()
    """Keys of the questions that the client knows; the answer comes at once if there are others."""
    can_answer: bool = False
    """True if a person can answer questions at the client now."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PendingQuestion:
    """A question of a rank that waits for an answer; answered by `AnswerQuestion`."""

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
    """The position of the next `Follow`."""
    num_left_out: int
    """Number of entries that the host had dropped before."""
    status: str
    """The line of progress."""
    questions: tuple[PendingQuestion, ...]
    """The questions that wait for an answer."""
    is_over: bool
    """True if the run is over, its ending is in the folder, and no entry follows."""
