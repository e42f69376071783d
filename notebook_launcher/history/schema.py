"""Plain frozen data of a run, and `RunReader`, through which every view reads it.

A live run, a run that is over and a run from a folder all return these records, so a view draws them alike.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import math
from typing import TYPE_CHECKING, Any, Literal, Protocol

from notebook_launcher.wording import NAME_LENGTH, bounded, clean, format_number, one_line, plural, told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_SPANS = 1024
"""Newest spans that are kept of each rank: at least the last 3 s."""

RunKind = Literal["run", "call", "cell", "session"]
"""A launch of its own; a call of a function or a cell on the ranks of a session; a detached session itself."""
RunState = Literal["starting", "running", "waiting", "paused", "stopping", "done", "failed", "stopped", "lost"]
"""`"waiting"`: ranks wait in a collective which others have not entered, for longer than `hang_notice`.
`"paused"`: `run.pause()` holds all ranks after the same update.
`"lost"`: the kernel ended before the run did; only a run that was read from its folder has this state."""

RankState = Literal["starting", "running", "waiting", "saving", "asking", "returned", "failed", "stopped", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One call of `report(...)` or `accelerator.log(...)`."""

    rank: int
    step: int
    """The given step; else the number of updates, or before the first update of earlier reports."""
    time: float
    """Seconds since the launch."""
    values: dict[str, float]


_MAX_NAMES = 8
"""Metrics that the text of `RunMetrics` names: it should fit under a cell."""


class RunMetrics(tuple[MetricPoint, ...]):
    """What the ranks of a run have reported: a tuple of points in the order of arrival, which prints a summary."""

    __slots__ = ()

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each point: `rank`, `step`, `time`, and a column for each metric.

        A metric has NaN in the rows of points that are without it. A metric that is itself named `rank`, `step` or
        `time` gets the column `rank_`, `step_` or `time_`.
        """
        pd: Any = importlib.import_module("pandas")
        taken = ("rank", "step", "time")
        rows = [
            {"rank": point.rank, "step": point.step, "time": point.time}
            | {f"{name}_" if name in taken else name: value for name, value in point.values.items()}
            for point in self
        ]
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(taken))

    def __repr__(self) -> str:
        if not self:
            return "no metrics: ranks send them by report(loss=loss) or accelerator.log({'loss': loss})"
        series: dict[str, list[float]] = {}
        for point in self:
            for name, value in point.values.items():
                series.setdefault(name, []).append(value)
        num_ranks = len({point.rank for point in self})
        steps = [point.step for point in self]
        head = f"{plural(len(self), 'point')} of {plural(num_ranks, 'rank')}, step {min(steps):,} to {max(steps):,}"
        lines = [f"{head}; a table: .to_pandas()"]
        for name, values in list(series.items())[:_MAX_NAMES]:
            finite = [value for value in values if math.isfinite(value)]
            text = f"  {one_line(name, NAME_LENGTH)}: {format_number(values[0])} → {format_number(values[-1])}"
            text += f", from {format_number(min(finite))} to {format_number(max(finite))}" if finite else ""
            odd = len(values) - len(finite)
            lines.append(f"{text}, {odd:,} not finite" if odd else text)
        more = len(series) - _MAX_NAMES
        return "\n".join(lines + [f"  {more} more"] * (more > 0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPicture:
    """An image or histogram that a rank reported, or a table that it logged; a notebook shows it."""

    rank: int
    step: int
    time: float
    """Seconds since the launch."""
    name: str
    mime: str
    """`"image/png"`, `"image/svg+xml"`, or of a table `"text/csv"`: names of columns, then rows, in UTF-8."""
    data: bytes = dataclasses.field(repr=False)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if self.mime == "text/csv":
            return {"text/plain": bounded(clean(self.data.decode("utf-8", "replace")), "picture.data has all")}
        if self.mime == "image/png":
            return {"text/plain": repr(self), self.mime: self.data}
        # As an image, because the drawing of a folder from elsewhere may hold a script, which some pages carry out.
        source = f"data:{self.mime};base64,{base64.b64encode(self.data).decode()}"
        return {"text/plain": repr(self), "text/html": f'<img src="{source}">'}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """A span of a rank's time that was spent on one phase."""

    phase: str
    """"data", "forward", "backward", "sync" or "step"."""
    start: float
    """Seconds since the launch."""
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPhases:
    """Time that a rank has spent on each phase, up to its last record; a rank sends five records a second."""

    windows: int = 0
    micro_batches: int = 0
    samples: float = 0.0
    """Samples in the micro-batches of all ranks together."""
    fullest: tuple[int, float] = (0, 0.0)
    """Micro-batches and samples of the fullest window; a window is cut short where its loader ends."""
    num_fullest: int = 0
    """Number of windows that are as full as the fullest."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds by phase."""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of spans by phase."""
    spans: tuple[PhaseSpan, ...] = dataclasses.field(default=(), repr=False)
    """The newest `MAX_SPANS` spans, the oldest of them first; of very short spans some are left out."""

    @property
    def shares(self) -> dict[str, float]:
        """Part of each phase in the measured time, 0 to 1."""
        total = sum(self.seconds.values())
        return {phase: seconds / total if total else 0.0 for phase, seconds in self.seconds.items()}

    __repr__ = told


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """Memory and load of a rank over time: samples in order, one entry in each column; None: not known."""

    times: tuple[float, ...] = ()
    """Seconds from the launch to each sample."""
    memory: tuple[int | None, ...] = ()
    """Bytes of resident memory."""
    load: tuple[float | None, ...] = ()
    """Processors that all threads of the rank's process kept busy since the sample before; 1.0 is one of them."""
    gpu_memory: tuple[int | None, ...] = ()
    """Bytes that all processes used on its GPU."""
    gpu_utilization: tuple[float | None, ...] = ()
    """Part of the time in which its GPU worked, 0 to 1."""

    __repr__ = told


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """State of a rank at one moment."""

    rank: int
    pid: int | None = None
    """Process id; None before the process starts and after it has ended."""
    node: str = ""
    """Name of its machine; empty if all ranks are on one."""
    state: RankState = "unknown"
    reason: str = ""
    """Reason of a failure in one line, `ValueError: boom`; empty for a rank that has not failed."""
    done: int | None = None
    """Items that its loop has done; the loop is `track(...)` or a prepared loader."""
    total: int | None = None
    """Items of that loop; None: unknown."""
    description: str = ""
    """Name of that loop."""
    rate: float | None = None
    """Items per second over the last seconds: of that loop or, while it is shorter than a second, also of those before.
    """
    step: int | None = None
    """Step of its last metrics, which is the number of updates unless the code gives another; without metrics, the
    number of updates. None if it has reported neither."""
    samples_per_second: float | None = None
    """Samples of all ranks per second of elapsed time, counted by this rank's Accelerator: over the last seconds; after
    the run, over its whole training."""
    memory: int | None = None
    """Bytes of resident memory now; None once it has ended."""
    peak_memory: int | None = None
    """Bytes of resident memory at its peak; None while it runs."""
    gpu_memory: int | None = None
    """Bytes that all processes use on its GPU; after the run, the highest value seen. None without a GPU."""
    gpu_utilization: float | None = None
    """Part of the last second in which its GPU worked, 0 to 1; None without a GPU, and after the run."""
    last_line: str = ""
    """Last line that it wrote."""
    waited: float | None = None
    """Seconds for which it has waited in a collective that other ranks have not entered; None below `hang_notice`."""
    where: str = ""
    """Place of this rank while any rank waits in that way: `in all_reduce (Cell In[3], line 4)`."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Last value of each metric that it reported."""
    seconds: float | None = None
    """Seconds from the launch to the rank's end; None while it runs."""
    returned: str = ""
    """Short form of the returned value; empty until the rank has returned."""

    __repr__ = told


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunChange:
    """A change of one setting while the run went on, made by `run.set(...)` on all ranks after the same update."""

    name: str
    before: float | None
    after: float | None
    """The new value; None: no clipping."""
    update: int
    """Number of updates that had been made."""
    step: int | None
    """Step of rank 0's last metrics at that time; None before the first metrics."""
    time: float
    """Seconds since the launch."""
    source: Literal["code", "monitor", "launcher"] = "code"
    """Origin of the change: `run.set(...)`, a field of the monitor, or the launcher, which continues with fewer ranks
    (`name="num_processes"`)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """A setting that `run.set(...)` can change, with its last known value."""

    name: str
    value: float | None
    """None: no clipping."""
    kind: Literal["positive", "optional", "count", "number", "integer", "switch"]
    """Values that it takes: a number above 0, the same or None, a whole number from 1 on; and of what the function
    offers by `tunable`, a number, a whole number, or True and False."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Failure of one rank."""

    rank: int
    summary: str
    """Description in one line."""
    traceback: str = ""
    victim: bool = False
    """True if the rank failed only because another rank had failed."""
    last_lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """State of a run at one moment; plain enough for JSON."""

    id: str
    """Name among all runs, which sorts by time: `20261121-142501-train-3f9c5e`."""
    name: str
    """Name of the function."""
    state: RunState
    started: float
    """Time of the launch, in seconds since the epoch."""
    seconds: float
    """Seconds from the launch to now or, if the run is over, to its end."""
    num_processes: int
    summary: str
    """Hardware that was found and options that were chosen, in one line."""
    seed: int | None
    """The seed of the launch; None: the ranks began with the random states of the kernel."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The fields of the run's LaunchConfig, as JSON has them."""
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Arguments of the function, defaults included, each in a few words."""
    restarts: int = 0
    stopped_by: str | None = None
    timed_out: bool = False
    error: str = ""
    """Error of a run that failed, in one line; else empty."""
    waiting: str = ""
    """Text about ranks that wait. In the state `"waiting"`: the ranks, their collective, for how long they have waited,
    and where the other ranks are. For a run that was stopped while ranks waited: the places of its ranks."""
    ranks: tuple[RankSnapshot, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    """Failures of the ranks, the culprit's first."""
    kind: RunKind = "run"
    """Origin of the run: a launch, or a session."""
    phases: Mapping[int, RankPhases] = dataclasses.field(default_factory=dict)
    """Phases by rank, for the ranks whose Accelerator has reported any."""
    usage: Mapping[int, RankUsage] = dataclasses.field(default_factory=dict)
    """Memory and load by rank, sampled from the first second on; of a long run, with more time between samples."""
    changes: tuple[RunChange, ...] = ()
    """Settings that were changed during the run, in order."""
    settings: tuple[RunSetting, ...] = ()
    """Settings that can be changed during the run, as they are now: the settings of its Accelerator, then the
    settings that the function offers."""
    notices: tuple[str, ...] = ()
    """Lines for the user that the ranks sent, such as the name of a checkpoint, in order; of a flood the first."""

    @property
    def is_over(self) -> bool:
        """True if the run has ended, so that nothing changes any more."""
        return self.state in ("done", "failed", "stopped", "lost")

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks per second, on average over the ranks that count them; None if none does."""
        known = [rank.samples_per_second for rank in self.ranks if rank.samples_per_second is not None]
        return sum(known) / len(known) if known else None

    __repr__ = told


class RunReader(Protocol):
    """Protocol through which views read a run: a live `Run`, or a `RecordedRun`."""

    def snapshot(self) -> RunSnapshot:
        """Return the present state of the run."""

    def metrics_since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
        """Return the metrics after a position, and the next position. The first position is 0."""

    def pictures_since(self, position: int) -> tuple[Sequence[RunPicture], int]:
        """Return the pictures after a position, and the next position. The first position is 0."""

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        """Return the text that a rank has written after a position, and the next position. The first position is 0.

        A position counts bytes. For a position beyond the end, the text is empty and the next position is the end.
        """

    def log_order(self, num_pieces: int) -> Sequence[tuple[int, int]]:
        """Return the newest pieces of output of all ranks in the order of their arrival; none if it is not known.

        A piece is a rank and the position in its log up to which this piece goes, from the end of the piece before.
        """
