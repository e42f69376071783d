"""Where a rank's time goes: data, forward, backward, sync, step.

`mark` says what the time since the mark before was spent on; that is one span. Spans are summed up at once
and only the newest are kept, so what a run is told is bounded and its shares are exact all the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher import context, messages

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PHASES", "Phase", "PhaseClock", "make_clock"]

Phase = Literal["data", "forward", "backward", "sync", "step"]

PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "sync", "step")
WATCH_INTERVAL = 0.1
"""Seconds between two windows in which the wait for the ranks is measured."""
SEND_INTERVAL = 0.2
"""Seconds between two records: an eye follows no more."""
MAX_SPANS = 64
"""Spans in a record, those of about 16 micro-batches; a power of two."""

_now = time.monotonic  # The kernel's clock too: ranks can be laid side by side.


class PhaseClock:
    """Measures one rank; a mark costs about 0.4 µs, and a record, five times a second, about 40 µs."""

    def __init__(self, send: Callable[[object], None], set_activity: Callable[[int], object] | None = None) -> None:
        self._send = send
        self._set_activity = set_activity
        self._since = 0.0
        self._sent_at = _now()
        self._watching = False
        self._watched_at = self._began = self._computed = 0.0
        self._sync_share = 0.0
        # A ring: the newest span lies at _num_spans - 1, modulo its size.
        self._spans: list[tuple[str, float, float]] = [("", 0.0, 0.0)] * MAX_SPANS
        self._num_spans = self._num_sent = 0
        self._start_sums()

    def _start_sums(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._counts: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._num_windows = self._num_micro_batches = 0
        self._num_samples = 0.0
        self._fullest, self._num_fullest = (0, 0.0), 0

    def mark(self, phase: Phase | None) -> None:
        """Say that the time since the last mark was spent on this phase; None: on none of them.

        The first mark after the clock was made, or flushed, only begins to measure.
        """
        self._mark_at(phase, _now())

    def _mark_at(self, phase: Phase | None, now: float) -> None:
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

    def watch_sync(self) -> bool:
        """Return whether the backward that begins is to call `mark_computed`.

        Its hook in the graph costs about 30 µs, so that is asked for a few times a second; the share of
        the others' time that is spent on waiting for the ranks is taken to be the same.
        """
        now = _now()
        self._watching = now - self._watched_at > WATCH_INTERVAL
        if self._watching:
            self._watched_at = now
            self._began = now
        return self._watching

    def mark_computed(self) -> None:
        """Say that a watched backward has computed all gradients and now waits for the ranks."""
        self._computed = _now()
        if self._set_activity is not None:
            self._set_activity(context.WAITING)

    def mark_backward(self, *, synced: bool) -> None:
        """Say that a backward has ended.

        Args:
            synced: Whether it waited for the ranks: then its time is that of two phases.
        """
        if not synced or not self._since:
            self.mark("backward")
            return
        now, since = _now(), self._since
        if self._watching and self._began < self._computed:
            self._sync_share = (now - self._computed) / max(now - since, 1e-9)
        if self._watching and self._set_activity is not None:
            self._set_activity(context.COMPUTING)
        self._watching = False
        self._mark_at("backward", since + (now - since) * (1.0 - self._sync_share))
        self._mark_at("sync", now)

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
        window = micro_batches, samples
        if window > self._fullest:
            self._fullest, self._num_fullest = window, 0
        self._num_fullest += window == self._fullest
        self.mark(None)

    def flush(self) -> None:
        """Send what has not been sent and stop measuring until the next mark; a rank does so when its function ends."""
        self._since = 0.0
        self._report(_now())

    def __reduce__(self) -> tuple[Any, ...]:
        # An Accelerator that is pickled finds the clock of the rank that it comes to.
        return make_clock, ()

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
            fullest=self._fullest,
            num_fullest=self._num_fullest,
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
        rank.clock = PhaseClock(rank.send, rank.set_activity)
    return rank.clock
