"""The records that travel between the kernel, the supervisor and the ranks.

Protocol 1. Every record is a frozen dataclass, pickled, one per SOCK_SEQPACKET packet, over a socket
pair that the kernel made (`channel.py`); descriptors travel beside it. The name says the direction:

    kernel -> fork server    StartSupervisor
    kernel -> supervisor     Setup, StartRank, SignalRanks, Close
    supervisor -> kernel     RankStarted, RankExited, RankNotStarted
    kernel -> rank           RunCall, LeaveGroup, InputReply, Finish
    rank -> kernel           RankReady, CallStarted, Returned, Raised, Display, ClearOutput,
                             InputRequest, Metrics, Progress, Phases, Notice

A rank's standard output and error are pipes, not records: what C code prints, and the last words of
a crash, arrive the same way as `print`.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import Any, Literal

from notebook_launcher.training_settings import TrainingSettings  # noqa: TC001 - loaded once, before ranks are forked

__all__ = [
    "DUMP_SIGNAL",
    "CallStarted",
    "ClearOutput",
    "Close",
    "Display",
    "ExceptionReport",
    "Failure",
    "Finish",
    "Frame",
    "GroupState",
    "InputReply",
    "InputRequest",
    "LeaveGroup",
    "Metrics",
    "Notice",
    "Phases",
    "Progress",
    "Raised",
    "RankExited",
    "RankNotStarted",
    "RankReady",
    "RankStarted",
    "Returned",
    "RunCall",
    "Setup",
    "SignalRanks",
    "StartRank",
    "StartSupervisor",
    "Unreadable",
]


DUMP_SIGNAL = signal.SIGRTMAX - 5
"""Makes a rank write the stacks of all its threads, even while it is stuck in C code."""


# kernel -> fork server


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartSupervisor:
    """Fork a supervisor. Descriptors: its channel, a pipe that is closed once it has been reaped."""


# kernel -> supervisor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all ranks of a tree share. Descriptors: the listening socket of the store, the board."""

    run_id: str

    num_processes: int
    start_method: str
    environ: dict[str, str]
    sys_path: list[str]
    argv: list[str]
    cwd: str
    kernel_pid: int
    threads_per_process: int
    seed: int
    settings: TrainingSettings
    backend: str | None
    many_calls: bool
    """Whether the ranks stay for further calls."""
    use_gpu: bool
    """Whether the ranks use GPUs: rank r takes visible device r modulo their number."""
    master_port: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """Start one rank. Descriptors: its channel, its standard output, its standard error."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalRanks:
    """Send a signal to each of these ranks; SIGKILL goes to its data-loader workers too."""

    ranks: tuple[int, ...]
    signum: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Kill what is left, reap it and exit."""


# supervisor -> kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """A rank was started."""

    rank: int
    pid: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process ended and its session is empty."""

    rank: int
    pid: int
    exitcode: int
    """As `multiprocessing` writes it: negative for a signal."""
    time: float
    """CLOCK_MONOTONIC, seconds."""
    peak_rss: int
    """Bytes."""
    oom: bool
    """Whether the kernel's out-of-memory killer struck in this control group meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankNotStarted:
    """A rank could not be started."""

    rank: int
    errno: int
    message: str


# kernel -> rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCall:
    """Run a function. Descriptor: its parcel, unless the process inherited the call by a fork."""

    call_id: int
    generation: int
    """Counts process groups: a rank whose group is of another generation makes it anew."""
    restart_count: int = 0
    max_restarts: int = 0
    can_ask: bool = True
    """Whether `input()` can be answered: a cell waits for this run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaveGroup:
    """Tear the process group down, so that peers that wait in it get an error instead of waiting."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Run the exit handlers and exit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputReply:
    """The answer to an `InputRequest`; `text` is None where nobody can answer."""

    text: str | None
    reason: str = ""
    number: int = 0
    """That of the request; another one's answer is dropped."""


# rank -> kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """The rank listens. Descriptor: the file that stack dumps go to."""

    rank: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted:
    """The function arrived, the process group is up, and the function is about to run."""

    call_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """How a rank's process group stands at the end of a call; a part of other records."""

    is_kept: bool
    """Whether it is still the one that the call began with."""
    num_calls: dict[str, int]
    """How many collectives each group has begun, by the group's name, and how many groups were made."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The function returned. Descriptor: the parcel of its value."""

    call_id: int
    time: float
    peak_rss: int
    group: GroupState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a traceback."""

    filename: str
    lineno: int
    name: str
    line: str = ""
    """Source as the rank sees it; empty where only the kernel has it (a cell)."""
    end_lineno: int | None = None
    colno: int | None = None
    end_colno: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionReport:
    """An exception with its chain, as plain data that always travels."""

    type_name: str
    """Qualified, without `builtins.`, as a traceback prints it."""
    message: str
    frames: tuple[Frame, ...]
    notes: tuple[str, ...] = ()
    syntax: str = ""
    """The extra lines a SyntaxError prints."""
    link: Literal["cause", "context", ""] = ""
    earlier: ExceptionReport | None = None
    group: tuple[ExceptionReport, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The function ended with an exception. Descriptor: the parcel of the exception, if it can travel."""

    call_id: int
    time: float
    peak_rss: int
    stage: Literal["arrive", "group", "function", "return"]
    report: ExceptionReport
    group: GroupState
    exit_code: int | None = None
    """The code of `sys.exit(code)`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """Rich output."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    transient: dict[str, Any]
    update: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClearOutput:
    """`clear_output(wait)`."""

    wait: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest:
    """`input(prompt)`: the rank waits for an `InputReply`."""

    prompt: str
    password: bool = False
    number: int = 0
    """Counts this rank's requests."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What `report(step=…, **metrics)` was given."""

    time: float
    step: int | None
    values: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What `track(iterable)` or a prepared loader has done."""

    time: float
    done: int
    total: int | None
    description: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """What a rank spent its time on since its last such record, so that sums over all records are exact."""

    time: float
    windows: int
    """Windows that ended."""
    micro_batches: int
    """Micro-batches that these windows held."""
    samples: float
    """What the micro-batches counted for, those of all ranks together."""
    fullest: tuple[int, float]
    """Micro-batches and samples of the window that held most."""
    num_fullest: int
    """Windows that held just as much."""
    seconds: dict[str, float]
    """By phase: "data", "forward", "backward", "sync" and "step"."""
    counts: dict[str, int]
    """By phase: how many spans these seconds are made of."""
    spans: tuple[tuple[str, float, float], ...]
    """The newest of them, the oldest first: phase, start by CLOCK_MONOTONIC, seconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One line for the user from the rank's own machinery."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """What a receiver makes of a record that it cannot unpickle."""

    reason: str


# What the kernel concludes. Not sent: shown, and kept on the exception.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known of one rank that failed."""

    rank: int
    kind: Literal["exception", "exit", "signal", "arrival", "return"]
    """`"arrival"`: the function, or what it uses, could not be rebuilt in the rank; `"return"`: its value did not
    travel."""
    time: float
    """CLOCK_MONOTONIC, seconds: one clock for all processes of the machine."""
    summary: str
    """One line: `ValueError: boom`, `SIGSEGV(-11)`, `exit code 3`."""
    traceback: str = ""
    """With the notebook's own source lines."""
    exitcode: int | None = None
    pid: int | None = None
    """Number of the rank's process; None if the process did not start."""
    victim: bool = False
    """Whether it only failed because another rank did."""
    place: str = ""
    """Where a crash in C code was called from, if the rank could say it: `f, Cell In[3], line 4: x = g()`."""
    last_lines: tuple[str, ...] = ()
    """The end of that rank's output, before the stacks that a crash adds."""
