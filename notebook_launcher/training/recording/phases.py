"""The time of a rank by phase: data, forward, backward, sync, step.

`mark` names the phase that the time since the last mark was spent on; that is one span. Marks are only noted, and
summed up where a record is sent: all of them, so that shares are exact, but only the newest spans are in it.

The times are the program's. On a GPU the program only queues the work: `device_phases.py` has the clock for a GPU.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.context import COMPUTING, WAITING, RankContext, current
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["PHASES", "Phase", "PhaseClock", "make_clock", "read_clock"]

Phase = Literal["data", "forward", "backward", "sync", "step"]

PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "sync", "step")
WAIT: tuple[None, Phase] = (None, "data")
SYNCED_BACKWARD: tuple[Phase, Phase] = ("backward", "sync")
WATCH_INTERVAL = 0.1
"""Seconds between two windows in which the wait for the ranks is measured."""
SEND_INTERVAL = 0.2
"""Seconds between two records: an eye follows no more."""
MAX_RECORD_SPANS = 64
"""Spans in a record, about 16 micro-batches."""

read_clock = time.monotonic  # The kernel's clock too: ranks can be laid side by side.


class PhaseClock:
    """Measures one rank; a mark costs about 0.15 µs, and 0.2 µs more in the record, five times a second.

    Args:
        send: Sends a record to the launcher.
        set_activity: Notes for the launcher if the rank computes or waits for others; None: nobody looks.
        settings_now: Returns the present values of the settings that a run can change, by name.
    """

    def __init__(
        self,
        send: Callable[[object], None],
        set_activity: Callable[[int], object] | None = None,
        settings_now: Callable[[], dict[str, float | None]] = dict,
    ) -> None:
        self._send = send
        self._set_activity = set_activity
        self._settings_now = settings_now
        self._due = read_clock() + SEND_INTERVAL
        """The moment after which a mark sends a record."""
        self._since = 0.0
        """The last mark that is in a record; 0: what comes next only begins to measure."""
        # Two lists: a tuple for each mark would be one more thing for the garbage collector to look at.
        self._phases: list[Phase | None] = []
        self._times: list[float] = []
        self._windows: list[tuple[int, float]] = []
        self._watching = False
        """True while the backward that runs is to call `mark_computed`."""
        self._watch_at = self._began = self._computed = 0.0
        self._sync_share = 0.0
        """The share of a backward that waited for the ranks, when one was watched last."""

    def mark(self, phase: Phase | None) -> None:
        """Mark the time since the last mark as spent on this phase; None: on none of them.

        The first mark after the clock was made, or flushed, only begins to measure.
        """
        now = read_clock()
        self._phases.append(phase)
        self._times.append(now)
        if now > self._due:
            self._report(now)

    begin_wait: Callable[[], float] = staticmethod(read_clock)
    """Begins a wait for data, for which `end_wait` gets the time that this returns."""

    def end_wait(self, since: float) -> None:
        """Mark the end of a wait for data; the time between the last mark and its begin belongs to no phase."""
        now = read_clock()
        self._phases += WAIT
        self._times += since, now
        if now > self._due:
            self._report(now)

    def begin_backward(self, *, syncs: bool) -> bool:
        """Mark the end of the forward; return True if the backward that begins is to call `mark_computed`.

        Its hook in the graph costs about 30 µs, so that is asked for a few times a second; the share of
        the others' time that is spent on waiting for the ranks is taken to be the same.

        Args:
            syncs: True if the backward will wait for the ranks.
        """
        now = read_clock()
        self._phases.append("forward")
        self._times.append(now)
        self._watching = syncs and now >= self._watch_at
        if self._watching:
            self._began, self._watch_at = now, now + WATCH_INTERVAL
        return self._watching

    def mark_computed(self) -> None:
        """Mark that a watched backward has computed all gradients and now waits for the ranks."""
        self._computed = read_clock()
        if self._set_activity is not None:
            self._set_activity(WAITING)

    def end_backward(self, *, synced: bool) -> None:
        """Mark the end of the backward.

        Args:
            synced: True if the backward waited for the ranks: its time then belongs to two phases.
        """
        if not synced:
            self.mark("backward")
            return
        now, since = read_clock(), self._times[-1] if self._times else self._since
        if self._watching:
            if self._began < self._computed:
                self._sync_share = (now - self._computed) / max(now - since, 1e-9)
            if self._set_activity is not None:
                self._set_activity(COMPUTING)
        # `mark` twice, written out: beside a busy peer, a call costs more than its work.
        self._phases += SYNCED_BACKWARD
        self._times += since + (now - since) * (1.0 - self._sync_share), now
        if now > self._due:
            self._report(now)

    def end_window(self, samples: Any, micro_batches: int = 1) -> None:
        """Count a window that has ended.

        Args:
            samples: The weight of the window's micro-batches, on all ranks together: a number, or a tensor on a GPU.
            micro_batches: Number of micro-batches.
        """
        self._windows.append((micro_batches, samples))

    def flush(self) -> None:
        """Send the remaining measurements, and stop until the next mark; a rank calls it when its function ends."""
        self._report(read_clock())
        self._since = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # An Accelerator that is pickled finds the clock of the rank that it comes to.
        return make_clock, ()

    def _report(self, now: float) -> None:
        self._due = now + SEND_INTERVAL
        since = self._since or next(iter(self._times), now)
        seconds, counts, newest = self._sums()
        if not (newest or self._windows):
            return
        fullest = max(self._windows, default=(0, 0.0))
        record = messages.Phases(
            time=now,
            windows=len(self._windows),
            micro_batches=sum(micro_batches for micro_batches, _ in self._windows),
            samples=math.fsum(samples for _, samples in self._windows),
            fullest=fullest,
            num_fullest=self._windows.count(fullest),
            seconds=seconds,
            counts=counts,
            spans=tuple(newest),
            settings=self._settings_now(),
            since=since,
        )
        self._windows.clear()
        self._send(record)

    def _sums(self) -> tuple[dict[str, float], dict[str, int], list[tuple[str, float, float]]]:
        """Take the marks; return the seconds and the number of spans of each phase, and the newest spans."""
        phases, times = self._phases, self._times
        self._phases, self._times = [], []
        if times and not self._since:  # The first mark only begins to measure.
            phases[0], self._since = None, times[0]
        begins = [self._since, *times][:-1]
        self._since = times[-1] if times else self._since
        # A step leaves up to 8 marks, so what is done for each of them is kept short.
        sums: dict[Phase | None, float] = dict.fromkeys((*PHASES, None), 0.0)
        for phase, begin, end in zip(phases, begins, times, strict=True):
            sums[phase] += end - begin
        found = collections.Counter(phases)
        newest = _newest_spans(phases, begins, times)
        return {phase: sums[phase] for phase in PHASES}, {phase: found[phase] for phase in PHASES}, newest


def _newest_spans(
    phases: Sequence[Phase | None], begins: Sequence[float], ends: Sequence[float]
) -> list[tuple[str, float, float]]:
    """Return phase, begin and duration of the last spans that belong to a phase, the oldest first."""
    marks = zip(reversed(phases), reversed(begins), reversed(ends), strict=True)
    spans: Iterator[tuple[str, float, float]] = (
        (phase, begin, end - begin) for phase, begin, end in marks if phase is not None
    )
    return list(itertools.islice(spans, MAX_RECORD_SPANS))[::-1]


def make_clock() -> PhaseClock | None:
    """Return the clock of the rank that this process is, the same at every call; None without a launcher."""
    context = current()
    if context is None:
        return None
    if context.clock is None:
        context.clock = _make_clock(context)
    assert isinstance(context.clock, PhaseClock)
    return context.clock


def _make_clock(context: RankContext) -> PhaseClock:
    import torch

    if not torch.cuda.is_available():
        return PhaseClock(context.send, context.set_activity, context.settings_now)
    from notebook_launcher.training.recording.device_phases import DevicePhaseClock, record_cuda_event

    return DevicePhaseClock(context.send, record_cuda_event, context.set_activity, context.settings_now)
