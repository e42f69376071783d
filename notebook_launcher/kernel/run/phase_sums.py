"""Time that one rank has spent on each phase of training, summed up from its records."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from notebook_launcher.history.schema import PhaseSpan, RankPhases

if TYPE_CHECKING:
    from notebook_launcher.engines.live_records import Packed

__all__ = ["PhaseSums"]


class PhaseSums:
    """The phases of one rank. The caller sees to it that one thread at a time adds or reads.

    Args:
        launched: Time of the launch, from which spans are counted.
        max_spans: Number of the newest spans that are kept.
    """

    def __init__(self, launched: float, max_spans: int) -> None:
        self._launched = launched
        self._num_windows = self._num_micro_batches = self._num_fullest = 0
        self._samples = 0.0
        self._fullest: tuple[int, float] = (0, 0.0)
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        # As they came: of a thousand ranks most spans are dropped before anyone reads them, and the garbage collector
        # passes over tuples of plain values.
        self._new_spans: collections.deque[tuple[str, float, float]] = collections.deque(maxlen=max_spans)
        """Spans since the last reading: phase, time of the start, seconds."""
        self._offset = 0.0
        """Seconds to add to the times of these spans."""
        self._max_spans = max_spans
        self._read: RankPhases | None = RankPhases()
        """The sums as they were last read; None: records have been added since."""
        self._read_spans: tuple[PhaseSpan, ...] = ()

    def add(self, packed: Packed, offset: float) -> None:
        """Add a packed record; `offset`: seconds by which the clock of this machine is ahead of the rank's."""
        _, _, _, num_windows, num_micro_batches, samples, fullest, num_fullest, more, numbers, spans, _, _ = packed
        if offset != self._offset:
            self.read()  # The spans that wait have the times of another clock, or are shifted by the old measurement.
            self._offset = offset
        self._read = None
        self._num_windows += num_windows
        self._num_micro_batches += num_micro_batches
        self._samples += samples
        seconds, counts = self._seconds, self._counts
        for phase, length in more.items():
            seconds[phase] = seconds.get(phase, 0.0) + length
        for phase, number in numbers.items():
            counts[phase] = counts.get(phase, 0) + number
        if fullest >= self._fullest:
            self._num_fullest = num_fullest + (self._num_fullest if fullest == self._fullest else 0)
            self._fullest = fullest
        self._new_spans.extend(spans)

    def read(self) -> RankPhases:
        """Return the sums."""
        if self._read is None:
            shift = self._offset - self._launched
            new = tuple(
                [
                    PhaseSpan(phase=phase, start=start + shift, seconds=length)
                    for phase, start, length in self._new_spans
                ]
            )
            self._new_spans.clear()
            kept = self._read_spans
            self._read_spans = kept[max(0, len(kept) + len(new) - self._max_spans) :] + new
            self._read = RankPhases(
                windows=self._num_windows,
                micro_batches=self._num_micro_batches,
                samples=self._samples,
                fullest=self._fullest,
                num_fullest=self._num_fullest,
                seconds=dict(self._seconds),
                counts=dict(self._counts),
                spans=self._read_spans,
            )
        return self._read
