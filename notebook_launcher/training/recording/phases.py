"""The time of a rank by phase: data, forward, backward, sync, step.

A mark names the phase that the time since the last mark was spent on; that is one span. Marks are only noted, and
summed up where a record is sent: all of them, so that shares are exact, but only the newest spans are in it.

A loop notes about six marks for each micro-batch, between calls of torch that push any other code out of the
processor's caches. There a call of a Python function takes 1 to 2 µs, whatever it does, so `note` and `note_window` are
methods of lists, and the loops themselves look whether `attend` is due.

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

Phase = Literal["data", "forward", "backward", "sync", "step"]

PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "sync", "step")
Mark = tuple[Phase | Literal["synced backward"] | None, float]
"""A phase, and the moment of its end, in seconds of `read_clock`. A synced backward, which waits for the ranks, is
divided where it is read into the phases "backward" and "sync"; None: no phase."""
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

    It sends records to the launcher, for which `set_activity` notes if the rank computes or waits for others;
    `settings_now` returns the present values of the settings that a run can change.
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
        self.send_at = read_clock() + SEND_INTERVAL
        """The moment after which `attend` sends a record."""
        self.watch_at = 0.0
        """The moment after which `attend` has the next backward that waits for the ranks watched."""
        self._since = 0.0
        """The last mark that is in a record; 0: what comes next only begins to measure."""
        # In one list: a tuple for each mark would be one more thing for the garbage collector to look at.
        self._marks: list[Any] = []
        """By turns the phase of a mark and its moment."""
        self._windows: list[tuple[int, float]] = []
        self.note: Callable[[Mark], None] = self._marks.extend
        """Notes a mark. The first one after the clock was made, or flushed, only begins to measure."""
        self.note_window: Callable[[tuple[int, Any]], None] = self._windows.append
        """Notes a window that has ended: the number of its micro-batches, and their weight on all ranks together, a
        number, or a tensor on a GPU."""
        self._began = self._computed = 0.0
        self._sync_share = 0.0
        """The share of a backward that waited for the ranks, when one was watched last."""

    def mark(self, phase: Phase | None) -> None:
        """Note that a phase, or None, ends now, and send a record if one is due."""
        now = read_clock()
        self.note((phase, now))
        if now > self.send_at:
            self._report(now)

    def attend(self, now: float, *, syncs: bool) -> bool:
        """Do what is due at the begin of a backward; return True if the backward is to be watched.

        Then `mark_computed` and `end_watched` are called before the backward's mark. The hook that this takes in the
        graph costs about 30 µs, so it is asked for a few times a second; the share of the others' time that is spent
        on waiting for the ranks is taken to be the same.

        Args:
            now: The present moment.
            syncs: True if the backward will wait for the ranks.
        """
        if now > self.send_at:
            self._report(now)
        if not syncs or now < self.watch_at:
            return False
        self._began, self.watch_at = now, now + WATCH_INTERVAL
        return True

    def mark_computed(self) -> None:
        """Mark that a watched backward has computed all gradients and now waits for the ranks."""
        self._computed = read_clock()
        if self._set_activity is not None:
            self._set_activity(WAITING)

    def end_watched(self) -> None:
        """Measure the wait of a watched backward, which has ended."""
        now = read_clock()
        if self._began < self._computed:
            self._sync_share = (now - self._computed) / max(now - self._began, 1e-9)
        if self._set_activity is not None:
            self._set_activity(COMPUTING)

    def flush(self) -> None:
        """Send the remaining measurements, and stop until the next mark; a rank calls it when its function ends."""
        self._report(read_clock())
        self._since = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        # An Accelerator that is pickled finds the clock of the rank that it comes to.
        return make_clock, ()

    def _report(self, now: float) -> None:
        self.send_at = now + SEND_INTERVAL
        since = self._since or next(iter(self._marks[1:2]), now)
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
        phases, ends = self._take()
        if ends and not self._since:  # The first mark only begins to measure.
            phases[0], self._since = None, ends[0]
        begins = [self._since, *ends][:-1]
        self._since = ends[-1] if ends else self._since
        # A step leaves up to 7 marks, so what is done for each of them is kept short.
        sums: dict[Phase | None, float] = dict.fromkeys((*PHASES, None), 0.0)
        for phase, begin, end in zip(phases, begins, ends, strict=True):
            sums[phase] += end - begin
        found = collections.Counter(phases)
        newest = _newest_spans(phases, begins, ends)
        return {phase: sums[phase] for phase in PHASES}, {phase: found[phase] for phase in PHASES}, newest

    def _take(self) -> tuple[list[Phase | None], list[float]]:
        """Take the marks; return the phases and their ends, with synced backwards divided."""
        marks = self._marks[:]
        self._marks.clear()
        phases: list[Phase | None] = []
        ends: list[float] = []
        for phase, end in zip(marks[::2], marks[1::2], strict=True):
            if phase == "synced backward":
                begin = ends[-1] if ends else self._since
                phases += SYNCED_BACKWARD
                ends += begin + (end - begin) * (1.0 - self._sync_share), end
            else:
                phases.append(phase)
                ends.append(end)
        return phases, ends


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
