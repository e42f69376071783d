"""What ranks tell while they run: metrics, progress, and what they spend their time on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from notebook_launcher import messages

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LiveRecords", "MetricPoint", "PhaseSpan", "RankPhases"]

MAX_METRICS = 1_000_000
"""Points of `report(...)` that are kept; beyond, the oldest go."""
MAX_SPANS = 1024
"""Spans that are kept of each rank, the newest: at least the last 3 s."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One call of `report(...)`."""

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


class LiveRecords:
    """The records of one run, folded in by its thread and read by any."""

    def __init__(self, launched: float) -> None:
        self.metrics: list[MetricPoint] = []
        self.progress: dict[int, messages.Progress] = {}
        self.phases: dict[int, RankPhases] = {}
        self._launched = launched
        self._num_reported: Counter[int] = Counter()

    def fold(self, rank: int, record: messages.Metrics | messages.Progress | messages.Phases) -> None:
        """Take in what a rank tells."""
        match record:
            case messages.Metrics():
                self._keep(rank, record)
            case messages.Progress():
                self.progress[rank] = record
            case messages.Phases():
                self.phases[rank] = self._sum(self.phases.get(rank, RankPhases()), record)

    def _keep(self, rank: int, record: messages.Metrics) -> None:
        step = self._num_reported[rank] if record.step is None else record.step
        self._num_reported[rank] += 1
        seconds = record.time - self._launched
        self.metrics.append(MetricPoint(rank=rank, step=step, time=seconds, values=record.values))
        if len(self.metrics) > MAX_METRICS:
            del self.metrics[: MAX_METRICS // 10]

    def _sum(self, sums: RankPhases, record: messages.Phases) -> RankPhases:
        new = (
            PhaseSpan(phase=phase, start=start - self._launched, seconds=seconds)
            for phase, start, seconds in record.spans
        )
        return RankPhases(
            windows=sums.windows + record.windows,
            micro_batches=sums.micro_batches + record.micro_batches,
            samples=sums.samples + record.samples,
            seconds={phase: sums.seconds.get(phase, 0.0) + more for phase, more in record.seconds.items()},
            counts={phase: sums.counts.get(phase, 0) + more for phase, more in record.counts.items()},
            spans=(*sums.spans, *new)[-MAX_SPANS:],
        )
