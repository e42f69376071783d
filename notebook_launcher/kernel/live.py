"""What ranks tell while they run: metrics, progress, and what they spend their time on."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from notebook_launcher import messages
from notebook_launcher.history.schema import MetricPoint, PhaseSpan, RankPhases

__all__ = ["LiveRecords"]

MAX_METRICS = 1_000_000
"""Points of `report(...)` that are kept; beyond, the oldest go."""
MAX_SPANS = 1024
"""Spans that are kept of each rank, the newest: at least the last 3 s."""
RATE_SECONDS = 5.0
"""A rate is that of the last seconds."""


class _Pace:
    """How fast a count grows."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()

    def note(self, time: float, count: float) -> None:
        if self._marks and count < self._marks[-1][1]:
            self._marks.clear()  # Another loop began.
        self._marks.append((time, count))
        while len(self._marks) > 2 and time - self._marks[1][0] > RATE_SECONDS:
            self._marks.popleft()

    def rate(self) -> float | None:
        marks = list(self._marks)
        seconds = marks[-1][0] - marks[0][0] if marks else 0.0
        return (marks[-1][1] - marks[0][1]) / seconds if seconds > 0 else None


class LiveRecords:
    """The records of one run, folded in by its thread and read by any."""

    def __init__(self, launched: float) -> None:
        self.progress: dict[int, messages.Progress] = {}
        self.phases: dict[int, RankPhases] = {}
        self.last_values: dict[int, dict[str, float]] = {}
        self.last_steps: dict[int, int] = {}
        # The metrics that are kept, and how many came before them: one value, so that readers see both as they fit.
        self._kept: tuple[list[MetricPoint], int] = ([], 0)
        self._launched = launched
        self._num_reported: Counter[int] = Counter()
        self._items: defaultdict[int, _Pace] = defaultdict(_Pace)
        self._samples: defaultdict[int, _Pace] = defaultdict(_Pace)

    def fold(self, rank: int, record: messages.Metrics | messages.Progress | messages.Phases) -> None:
        """Take in what a rank tells."""
        match record:
            case messages.Metrics():
                self._keep(rank, record)
            case messages.Progress():
                self.progress[rank] = record
                self._items[rank].note(record.time, record.done)
            case messages.Phases():
                self.phases[rank] = self._sum(self.phases.get(rank, RankPhases()), record)
                self._samples[rank].note(record.time, self.phases[rank].samples)

    @property
    def metrics(self) -> list[MetricPoint]:
        """All that are kept."""
        return self._kept[0]

    def metrics_since(self, position: int) -> tuple[list[MetricPoint], int]:
        """Return the metrics after a position, as far as they are kept, and the next position."""
        metrics, num_dropped = self._kept
        start = max(0, position - num_dropped)
        new = metrics[start:]
        return new, num_dropped + start + len(new)

    def items_per_second(self, rank: int) -> float | None:
        """Return how fast the rank's loop goes."""
        return self._items[rank].rate() if rank in self._items else None

    def samples_per_second(self, rank: int) -> float | None:
        """Return how many samples of all ranks the rank's Accelerator counts each second."""
        return self._samples[rank].rate() if rank in self._samples else None

    def _keep(self, rank: int, record: messages.Metrics) -> None:
        step = self._num_reported[rank] if record.step is None else record.step
        self._num_reported[rank] += 1
        seconds = record.time - self._launched
        metrics, num_dropped = self._kept
        metrics.append(MetricPoint(rank=rank, step=step, time=seconds, values=record.values))
        self.last_steps[rank] = step
        self.last_values.setdefault(rank, {}).update(record.values)
        if len(metrics) > MAX_METRICS:
            num = MAX_METRICS // 10
            self._kept = (metrics[num:], num_dropped + num)

    def _sum(self, sums: RankPhases, record: messages.Phases) -> RankPhases:
        new = (
            PhaseSpan(phase=phase, start=start - self._launched, seconds=seconds)
            for phase, start, seconds in record.spans
        )
        fullest = max(sums.fullest, record.fullest)
        return RankPhases(
            windows=sums.windows + record.windows,
            micro_batches=sums.micro_batches + record.micro_batches,
            samples=sums.samples + record.samples,
            fullest=fullest,
            num_fullest=sum(part.num_fullest for part in (sums, record) if part.fullest == fullest),
            seconds={phase: sums.seconds.get(phase, 0.0) + more for phase, more in record.seconds.items()},
            counts={phase: sums.counts.get(phase, 0) + more for phase, more in record.counts.items()},
            spans=(*sums.spans, *new)[-MAX_SPANS:],
        )
