"""The records that the kernel, the supervisor and the ranks send to each other.

Protocol 1. Every record is a named tuple, or a frozen dataclass, pickled, one per SOCK_SEQPACKET packet, over a socket
pair that the kernel made (`messaging/channel.py`); descriptors travel beside it:

    kernel -> fork server    Imports, StartSupervisor, StartHost
    fork server -> kernel    ImageMade
    kernel -> supervisor     Setup, StartRank, SignalRanks, Close
    supervisor -> kernel     RankStarted, RankExited, RankNotStarted
    kernel -> rank           RunCall, LeaveGroup, InputReply, Change, DebugFailure, ForgetFailure,
                             CommMessage, Finish
    rank -> kernel           RankReady, CallStarted, Returned, Raised, Display, ClearOutput,
                             InputRequest, Metrics, ReportedPicture, Progress, Phases, Notice, CheckpointSaved,
                             Offered, TrainerMade, Changed, CommMessage, CommHandled, Profiled, DebugEnded

A rank's standard output and error are pipes, not records. So output of C code, and the last lines before
a crash, arrive in the same way as `print`.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import struct
from typing import Any, Literal, NamedTuple, TypeAlias

from notebook_launcher.settings.training_settings import TrainingSettings  # noqa: TC001 - loaded once, before ranks are forked

DUMP_SIGNAL = signal.SIGRTMAX - 5
"""The signal at which a rank writes the stacks of all its threads, even while it is stuck in C code."""
COMM_SIGNAL = signal.SIGRTMAX - 6
"""The signal at which a rank that runs a call reads what the page has sent to its widgets."""
FORKED = struct.Struct("<2i")
"""Process numbers of a supervisor and of its parent, which is the fork server or its deputy."""
ChangeAction: TypeAlias = Literal["set", "pause", "resume", "save", "stop", "profile"]
ChangeSource: TypeAlias = Literal["code", "monitor"]
Stage: TypeAlias = Literal["arrive", "function", "return"]


# kernel -> rank and back


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommMessage:
    """A message between a rank's widget and the page, over the widget's comm; the kernel passes it on."""

    kind: Literal["comm_open", "comm_msg", "comm_close"]
    """The type of Jupyter's message."""
    comm_id: str
    data: dict[str, Any]
    """Content for the page or the widget; JSON can carry it."""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    buffers: tuple[bytes, ...] = ()
    target_name: str = ""
    """The comm's target in the page; for `comm_open`."""
    parent: dict[str, Any] | None = None
    """Header of the page's message that this one is, or answers; None: it answers the cell."""


# kernel -> fork server and back


class Imports(NamedTuple):
    """What the kernel has imported since it last said so: the fork server imports it, too, once it has time."""

    names: tuple[str, ...]
    """Modules of installed packages, in the order of their imports."""
    local: dict[str, str]
    """By top-level name, the files of all modules that no package installs."""
    environ: dict[str, str]
    """The kernel's environment."""


class ImageMade(NamedTuple):
    """The fork server has imported what the kernel has, as far as its ranks can inherit it."""

    num_modules: int
    """Modules that ranks inherit."""
    left_out: dict[str, str]
    """By package or module, the reason why ranks import it by themselves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartSupervisor:
    """Fork a supervisor. Descriptors: its channel, and a pipe that gets FORKED, and ends once it has been reaped."""

    is_interactive: bool
    """True if a person at a prompt launches, who will launch again."""
    needs: tuple[str, ...] | None
    """Packages and modules that the ranks will import, which the fork server then imports first; None: all that the
    kernel has imported."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartHost(StartSupervisor):
    """Fork the host of a detached run. Descriptor: the host's channel."""

    module: str
    """Module whose `main` is the host's life, because the fork server's layer does not know what a host is."""


# kernel -> supervisor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The part of a launch that one machine holds, and where all ranks meet; a part of other records."""

    ranks: tuple[int, ...]
    """The ranks of this machine, consecutive."""
    node: int = 0
    """Number of this machine among the machines of the launch."""
    num_nodes: int = 1
    store_address: str = "127.0.0.1"
    """The address at which the rendezvous store listens, on the first machine."""
    interface: str = "lo"
    """The network interface of this machine over which its ranks talk to others."""

    @property
    def hosts_store(self) -> bool:
        """True on the machine where the rendezvous store is."""
        return self.node == 0

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank among the ranks of this machine."""
        return self.ranks.index(rank)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """The states of a process' random number generators; a part of other records."""

    python: bytes
    """The words of `random`'s Mersenne Twister, and its position."""
    python_normal: float | None
    """The second of a pair of normal numbers, which `random` has drawn ahead."""
    numpy: tuple[bytes, int, int, float] | None
    """Key, position and normal number of NumPy's legacy generator; None: it was not imported."""
    torch: bytes | None
    """None: torch was not imported."""
    torch_seed: int | None
    """The seed that torch's generator was last given."""
    cuda: bytes | None
    """The state of the current GPU; None: CUDA was not in use."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Prepare for ranks with these settings. Descriptors: the board, the listening socket of the store."""

    run_id: str
    num_processes: int
    start_method: str
    environ: dict[str, str]
    """The environment of the ranks; on another machine what is added to its own."""
    sys_path: list[str]
    argv: list[str]
    cwd: str
    kernel_pid: int
    ends_at: float | None
    """Time by `time.monotonic()` at which a detached run is to have ended: from then on its host, which may be stopped
    (SIGSTOP), is continued. None: no such time."""
    threads_per_process: int
    random: int | RandomStates | None
    """The seed of the ranks' generators, or the states with which they begin; None: not known yet."""
    rank_seeds: str | None
    """`LaunchConfig.rank_seeds`."""
    settings: TrainingSettings
    backend: str | None
    many_calls: bool
    """True for a session, whose ranks wait for further calls."""
    keeps_failures: bool
    """True if a rank keeps the exception of a call, with its frames, for a debugger."""
    use_gpu: bool
    """True if the ranks use GPUs: the rank with local number r takes the visible device r modulo the number of
    devices."""
    place: Place
    master_port: int


class StartRank(NamedTuple):
    """Start one rank. Descriptors: the rank's channel, standard output and standard error."""

    rank: int


class SignalRanks(NamedTuple):
    """Send a signal to each of these ranks; SIGKILL also goes to their data-loader workers."""

    ranks: tuple[int, ...]
    signum: int


class Close(NamedTuple):
    """Kill and reap the remaining processes, and exit."""


# supervisor -> kernel


class RankStarted(NamedTuple):
    """A rank's process was started."""

    rank: int
    pid: int


class RankExited(NamedTuple):
    """A rank's process has exited, and no process of the rank's session is left."""

    rank: int
    pid: int
    exitcode: int
    """As in `multiprocessing`: negative for a signal."""
    time: float
    """Time of the exit by CLOCK_MONOTONIC, in seconds."""
    peak_rss: int
    """Peak resident memory in bytes."""
    oom: bool
    """True if Linux's out-of-memory killer killed a process of this control group while the rank lived."""


class RankNotStarted(NamedTuple):
    """A rank's process could not be started."""

    rank: int
    errno: int
    message: str


# kernel -> rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCall:
    """Call the function. Descriptor: the parcel of the call, unless the process inherited the call by a fork."""

    call_id: int
    generation: int
    """Number of the process group: a rank whose group has another number makes its group again."""
    restart_count: int = 0
    max_restarts: int = 0
    checkpoints: tuple[str, ...] | None = None
    """Folders of the checkpoints that this run has saved, the newest last; None: the function resumes by itself."""
    can_ask: bool = True
    """True if `input()` can be answered, because a cell waits for this run."""
    ranks: tuple[int, ...] | None = None
    """The ranks that call the function; the others return at once. None: all ranks."""
    widget_ranks: tuple[int, ...] = ()
    """The ranks whose widgets the cell shows; widgets of other ranks are shown as text."""
    comm_messages: tuple[CommMessage, ...] = ()
    """Messages of the page to widgets of these ranks, to be handled before the function is called."""
    keeps_failure: bool = False
    """True if the ranks keep what the last call left for the debugger."""
    first_folders: tuple[str, ...] = ()
    """Folders that the kernel has put at the beginning of `sys.path` since the ranks started. Sent with each call,
    because a replaced rank starts with the old path."""
    last_folders: tuple[str, ...] = ()
    """Folders that the kernel has added to `sys.path` elsewhere since."""


class LeaveGroup(NamedTuple):
    """Shut the process group down, so that peers that wait in it get an error."""


class ProfileOrder(NamedTuple):
    """Profile the next updates with `torch.profiler`; a part of other records."""

    ranks: tuple[int, ...]
    updates: int
    folder: str | None
    """Folder for the traces; None: none is written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Do something after an update on which all ranks agree; the board announces this record.

    Ranks that a change has paused carry out the following ones as they come, until one resumes or stops the run.
    """

    number: int
    """Number of the change in this attempt, from 1 on."""
    action: ChangeAction
    values: dict[str, float | str | None] = dataclasses.field(default_factory=dict)
    """New values, by setting: numbers, factors such as `"x0.5"`, or None."""
    source: ChangeSource = "code"
    """Origin of the request: a call such as `run.set`, or the monitor's page."""
    profile: ProfileOrder | None = None
    """Updates and ranks to profile, for the action "profile"."""


class DebugFailure(NamedTuple):
    """Open the debugger in the frames of the exception with which the last call ended; answered by `DebugEnded`."""


class ForgetFailure(NamedTuple):
    """Release the exception with which the last call ended, and its frames."""


class Finish(NamedTuple):
    """Run the exit handlers and exit."""


class InputReply(NamedTuple):
    """The answer to an `InputRequest`."""

    text: str | None
    """The text that the user typed; None if no user can answer."""
    reason: str = ""
    """The reason why no user can answer."""
    number: int = 0
    """Number of the request; a rank drops the answer to a request other than its last one."""


# rank -> kernel


class RankReady(NamedTuple):
    """The rank waits for a call. Descriptor: the file to which the rank writes its stacks."""

    rank: int


class CallStarted(NamedTuple):
    """The function has arrived, the process group is up, and the function is about to run."""

    call_id: int


class GroupState(NamedTuple):
    """State of a rank's process group at the end of a call; a part of other records."""

    is_kept: bool
    """True if the rank still has the group with which the call began."""
    num_calls: dict[str, int]
    """Number of collectives that each group has begun, by the group's name, and the number of groups made."""


class Returned(NamedTuple):
    """The function has returned. Descriptor: the parcel of the value, if the value can travel."""

    call_id: int
    time: float
    peak_rss: int
    group: GroupState
    unsent: str = ""
    """The reason why the value could not travel; empty if it did."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a traceback."""

    filename: str
    lineno: int
    name: str
    line: str = ""
    """Source line as the rank reads it; empty if only the kernel has it (a cell)."""
    end_lineno: int | None = None
    colno: int | None = None
    end_colno: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionReport:
    """An exception with its chain, as plain data that always travels."""

    type_name: str
    """Qualified name, without `builtins.`, as in a traceback."""
    message: str
    frames: tuple[Frame, ...]
    notes: tuple[str, ...] = ()
    syntax: str = ""
    """The extra lines that a SyntaxError prints."""
    link: Literal["cause", "context", ""] = ""
    earlier: ExceptionReport | None = None
    group: tuple[ExceptionReport, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptFrames:
    """Frames that a rank keeps of the exception with which a call ended; a part of other records."""

    num_frames: int
    tensor_bytes: int
    """Bytes of the tensors that the frames' variables reach."""
    gpu_bytes: int | None
    """Bytes that torch has allocated on the rank's GPU, for whatever purpose; None: the rank uses no GPU."""


class Raised(NamedTuple):
    """The call has ended with an exception. Descriptor: the parcel of the exception, if it can travel."""

    call_id: int
    time: float
    peak_rss: int
    stage: Stage
    """The stage of the call that raised: unpacking, the function and what it needs, packing its value."""
    report: ExceptionReport
    group: GroupState
    exit_code: int | None = None
    """The exit code, if the exception is a `SystemExit`."""
    kept: KeptFrames | None = None
    """The frames that the rank keeps until its next call; None if it keeps none."""
    is_spent: bool = False
    """True if the process is of no further use, because its GPU context is lost, or it has no descriptor left; the
    session ends it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """Show rich output, or update the output with the same `display_id`."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    transient: dict[str, Any]
    update: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClearOutput:
    """Clear the cell's output, as `clear_output(wait)` does."""

    wait: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest:
    """Ask the user, as `input(prompt)` does; the rank waits for an `InputReply`."""

    prompt: str
    password: bool = False
    number: int = 0
    """Number of the request among this rank's requests."""


class CommHandled(NamedTuple):
    """A widget has handled a `CommMessage`; the kernel sends the next one only then."""


class Metrics(NamedTuple):
    """The arguments of one `report(step=…, **metrics)`."""

    time: float
    step: int | None
    values: dict[str, float]


class ReportedPicture(NamedTuple):
    """An image or histogram among the arguments of `report(...)`, or a table of `accelerator.log_table(...)`."""

    time: float
    step: int | None
    name: str
    mime: str
    """`"image/png"`, `"image/svg+xml"`, or of a table `"text/csv"`."""
    data: bytes


class Progress(NamedTuple):
    """Progress of `track(iterable)` or of a prepared loader."""

    time: float
    done: int
    total: int | None
    description: str
    loops: int
    """Number of loops that have begun, this one included."""
    items: int
    """Items of all loops that are done; an item of an outer loop counts only if no inner loop counted in it."""


class Phases(NamedTuple):
    """Time that a rank spent on each phase of training since its last such record; the records add up exactly."""

    time: float
    windows: int
    """Number of windows that ended."""
    micro_batches: int
    """Number of micro-batches that these windows held."""
    samples: float
    """Samples that these micro-batches counted for, over all ranks."""
    fullest: tuple[int, float]
    """Micro-batches and samples of the window that held most."""
    num_fullest: int
    """Number of windows that held as much as the fullest."""
    seconds: dict[str, float]
    """Seconds by phase: "data", "forward", "backward", "sync" and "step"."""
    counts: dict[str, int]
    """Number of spans by phase, of which the seconds are the sum."""
    spans: tuple[tuple[str, float, float], ...]
    """The newest spans, oldest first: phase, start by CLOCK_MONOTONIC, seconds."""
    settings: dict[str, float | None] | None = None
    """Present settings of the Accelerator that carries changes out; from rank 0 alone."""
    since: float = math.inf
    """Time by CLOCK_MONOTONIC at which the first of its spans began, even if it holds only the newest ones."""


class CheckpointSaved(NamedTuple):
    """A checkpoint is whole, or about to be; sent by the rank that wrote the manifest, also before a folder appears."""

    folder: str


class Notice(NamedTuple):
    """Show one line of the launcher's own to the user."""

    text: str
    once: str = ""
    """Lines with this key are shown once for all ranks, the first that comes; empty: always."""


class Unreadable(NamedTuple):
    """Stands in for a record that the receiver could not unpickle; never sent."""

    reason: str


class Offered(NamedTuple):
    """The function offers a setting, by `tunable`."""

    name: str
    value: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMade:
    """The function has made a trainer of another library, which makes updates of its own, or trains with it."""

    name: str
    """As in `transformers' Trainer`."""
    answers: bool = False
    """True if it has a callback of ours that takes requests."""
    settings: dict[str, float | None] = dataclasses.field(default_factory=dict)
    """Present settings that `run.set` changes; empty before it trains."""


class Changed(NamedTuple):
    """A `Change` was carried out, after this number of updates."""

    time: float
    update: int
    action: ChangeAction
    values: dict[str, tuple[float | None, float | None]]
    """Values before and after, by setting."""
    source: ChangeSource = "code"
    """Origin of the request."""


class Profiled(NamedTuple):
    """The result of a `ProfileOrder` on one rank; answered by each of its ranks."""

    rank: int
    first_update: int
    """Number of updates that had been made when the profile began."""
    updates: int
    """Number of updates that it holds; fewer than were asked for if the function ended before."""
    operators: tuple[tuple[str, int, float, float, float, float], ...] = ()
    """The operators that took most time: name, calls, and seconds of the CPU without and with what they called,
    then of the GPU."""
    num_operators: int = 0
    trace: str = ""
    """File with the trace; empty if none was written."""
    problem: str = ""
    """The reason why there is no profile, or no trace."""


class DebugEnded(NamedTuple):
    """The user has left the debugger that a `DebugFailure` opened."""
