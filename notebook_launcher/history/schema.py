"""What is known of a run, as frozen plain data: the one thing that every view reads.

A live run, a run that is over and one that was read from its folder all give these records, so a view
draws them alike.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "FailureRecord",
    "MetricPoint",
    "PhaseSpan",
    "RankPhases",
    "RankSnapshot",
    "RankState",
    "RunReader",
    "RunSnapshot",
    "RunState",
]

RunState = Literal["starting", "running", "waiting", "stopping", "done", "failed", "stopped", "lost"]
"""`"waiting"`: ranks wait in a collective which others have not entered, for longer than `hang_notice`.
`"lost"`: the kernel ended before the run did; only a run read from its folder says so."""

RankState = Literal["starting", "running", "waiting", "saving", "asking", "returned", "failed", "stopped", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One call of `report(...)` or `accelerator.log(...)`."""

    rank: int
    step: int
    time: float
    """Seconds since the launch."""
    values: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """One stretch of a rank's time."""

    phase: str
    """"data", "forward", "backward", "sync" or "step"."""
    start: float
    """Seconds since the launch."""
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPhases:
    """What a rank has spent its time on up to its last record; these come five times a second."""

    windows: int = 0
    micro_batches: int = 0
    samples: float = 0.0
    """What the micro-batches counted for, those of all ranks together."""
    fullest: tuple[int, float] = (0, 0.0)
    """Micro-batches and samples of the window that held most; others are cut short where their loader ends."""
    num_fullest: int = 0
    """Windows that held just as much."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By phase."""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """By phase: how many spans there were."""
    spans: tuple[PhaseSpan, ...] = ()
    """The newest 1,024 of them, the oldest first; where spans are short, some between are left out."""

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's part of all the time that was measured, 0 to 1."""
        total = sum(self.seconds.values())
        return {phase: seconds / total if total else 0.0 for phase, seconds in self.seconds.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """What is known of a rank at one moment."""

    rank: int
    pid: int | None = None
    """None before the process is born and after it has ended."""
    state: RankState = "unknown"
    reason: str = ""
    """Of a rank that failed: one line, `ValueError: boom`."""
    done: int | None = None
    """How many items its loop has done: `track(...)`, or a prepared loader."""
    total: int | None = None
    description: str = ""
    """What the loop is called."""
    rate: float | None = None
    """Items of that loop per second, over the last seconds."""
    step: int | None = None
    """That of its last metrics; else, how many updates its Accelerator has made."""
    samples_per_second: float | None = None
    """Of all ranks together, as this rank's Accelerator counts them, over the last seconds."""
    memory: int | None = None
    """Bytes of resident memory now; None once it has ended."""
    peak_memory: int | None = None
    """Bytes of resident memory at the most; None while it runs."""
    gpu_memory: int | None = None
    """Bytes that all processes use on its GPU; once the run is over, the most that was seen; None without one."""
    gpu_utilization: float | None = None
    """The part of the last second in which its GPU was at work, 0 to 1; None without one, and once the run is over."""
    last_line: str = ""
    """What it wrote last."""
    waited: float | None = None
    """Seconds for which it has waited in a collective which other ranks have not entered; None while these are fewer
    than `hang_notice`."""
    where: str = ""
    """While any rank waits like that, the place of this one: `in all_reduce (Cell In[3], line 4)`."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The last value of each metric that it reported."""
    seconds: float | None = None
    """From the launch to the rank's end; None while it runs."""
    returned: str = ""
    """The returned value's short form; empty until there is one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """What is known of one rank that failed."""

    rank: int
    summary: str
    """One line."""
    traceback: str = ""
    victim: bool = False
    """Whether it only failed because another rank did."""
    last_lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """What is known of a run at one moment; plain enough for JSON."""

    id: str
    """Sorts by time: `20261121-142501-train-3f9c5e`."""
    name: str
    """The function's."""
    state: RunState
    started: float
    """Seconds since the epoch."""
    seconds: float
    """From the launch to now, or to its end."""
    num_processes: int
    summary: str
    """One line: what was found and chosen."""
    seed: int
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The fields of the run's LaunchConfig, as JSON has them."""
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the function was called with, each argument in a few words; its defaults too."""
    restarts: int = 0
    stopped_by: str | None = None
    timed_out: bool = False
    error: str = ""
    """One line: what the run failed with; empty otherwise."""
    waiting: str = ""
    """In the state `"waiting"`: which ranks wait in which collective, for how long, and where the others are. Of a run
    that was stopped while ranks waited in a collective: where its ranks were."""
    ranks: tuple[RankSnapshot, ...] = ()
    failures: tuple[FailureRecord, ...] = ()
    """The culprit first."""
    phases: Mapping[int, RankPhases] = dataclasses.field(default_factory=dict)
    """By rank, as far as the ranks' Accelerators have told."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("done", "failed", "stopped", "lost")


class RunReader(Protocol):
    """What views read: a live `Run`, or one from its folder."""

    def snapshot(self) -> RunSnapshot:
        """Return what is known now."""

    def metrics_since(self, position: int) -> tuple[Sequence[MetricPoint], int]:
        """Return the metrics after a position, and the next position; begin with 0."""

    def logs_since(self, rank: int, position: int) -> tuple[str, int]:
        """Return what a rank has written after a position, and the next position; begin with 0.

        A position counts bytes. One beyond the end gives an empty text and the end.
        """
