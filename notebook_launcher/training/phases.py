"""Where a rank's time goes: data, forward, backward, sync, step.

`mark` says what the time since the mark before was spent on; that is one span. Spans are summed up at once
and only the newest are kept, so what a run is told is bounded and its shares are exact all the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from notebook_launcher import context, messages

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PHASES", "Phase", "PhaseClock", "make_clock"]

Phase = Literal["data", "forward", "backward", "sync", "step"]

PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "sync", "step")
SEND_INTERVAL = 0.2
"""Seconds between two records: an eye follows no more."""
MAX_SPANS = 64
"""Spans in a record, those of about 16 micro-batches; a power of two."""

_now = time.monotonic  # The kernel's clock too: ranks can be laid side by side.


class PhaseClock:
    """Measures one rank; a mark costs about 0.4 µs, and a record, five times a second, about 40 µs."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._since = 0.0
        self._sent_at = _now()
        # A ring: the newest span lies at _num_spans - 1, modulo its size.
        self._spans: list[tuple[str, float, float]] = [("", 0.0, 0.0)] * MAX_SPANS
        self._num_spans = self._num_sent = 0
        self._start_sums()

    def _start_sums(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._counts: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._num_windows = self._num_micro_batches = 0
        self._num_samples = 0.0

    def mark(self, phase: Phase | None) -> None:
        """Say that the time since the last mark was spent on this phase; None: on none of them.

        The first mark after the clock was made, or flushed, only begins to measure.
        """
        now = _now()
        since = self._since
        self._since = now
        if phase is not None and since:
            seconds = now - since
            self._seconds[phase] += seconds
            self._counts[phase] += 1
            self._spans[self._num_spans & MAX_SPANS - 1] = (phase, since, seconds)
            self._num_spans += 1
        if now - self._sent_at > SEND_INTERVAL:
            self._report(now)

    def end_window(self, samples: float, micro_batches: int = 1) -> None:
        """Say that a window has ended.

        The time since the last mark is nobody's.

        Args:
            samples: What its micro-batches counted for, those of all ranks together.
            micro_batches: How many they were.
        """
        self._num_windows += 1
        self._num_micro_batches += micro_batches
        self._num_samples += samples
        self.mark(None)

    def flush(self) -> None:
        """Send what has not been sent and stop measuring until the next mark; a rank does so when its function ends."""
        self._since = 0.0
        self._report(_now())

    def _report(self, now: float) -> None:
        self._sent_at = now
        num = min(self._num_spans - self._num_sent, MAX_SPANS)
        if not (num or self._num_windows):
            return
        newest = range(self._num_spans - num, self._num_spans)
        record = messages.Phases(
            time=now,
            windows=self._num_windows,
            micro_batches=self._num_micro_batches,
            samples=self._num_samples,
            seconds=self._seconds,
            counts=self._counts,
            spans=tuple(self._spans[at & MAX_SPANS - 1] for at in newest),
        )
        self._num_sent = self._num_spans
        self._start_sums()
        self._send(record)


def make_clock() -> PhaseClock | None:
    """Return the clock of the rank that this process is, the same at every call; None without a launcher."""
    rank = context.current()
    if rank is None:
        return None
    if rank.clock is None:
        rank.clock = PhaseClock(rank.send)
    return rank.clock
