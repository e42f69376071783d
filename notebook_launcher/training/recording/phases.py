"""The time of a rank by phase: data, forward, backward, sync, step.

A mark names the phase that the time since the last mark was spent on; that is one span. Marks are only noted, and
summed up where a record is sent: all of them, so that shares are exact, but only the newest spans are in it.

A loop notes about six marks for each micro-batch, between calls of torch that push any other code out of the
processor's caches. There a call of a Python function takes 1 to 2 µs, whatever it does, so `note` and `note_window` are
methods of lists, and the loops themselves look whether `attend` is due.

The times are the program's. On a GPU, where it only queues the work, they are the device's.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import math
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from notebook_launcher.context import COMPUTING, WAITING, current
from notebook_launcher.messaging import messages
from notebook_launcher.training.queued_work import mark_queued_work

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
        marks = zip(reversed(phases), reversed(begins), reversed(ends), strict=True)
        spans: Iterator[tuple[str, float, float]] = (
            (phase, begin, end - begin) for phase, begin, end in marks if phase is not None
        )
        newest = list(itertools.islice(spans, MAX_RECORD_SPANS))[::-1]
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


def make_clock() -> PhaseClock | None:
    """Return the clock of the rank that this process is, the same at every call; None without a launcher."""
    context = current()
    if context is None:
        return None
    if context.clock is None:
        if torch.cuda.is_available():
            # No event is queued before the process uses its GPU, and inside a captured graph.
            record = functools.partial(mark_queued_work, timed=True)
            context.clock = DevicePhaseClock(context.send, record, context.set_activity, context.settings_now)
        else:
            context.clock = PhaseClock(context.send, context.set_activity, context.settings_now)
    assert isinstance(context.clock, PhaseClock)
    return context.clock


# --------------------------------------------------------------------------------------------------------------------
# The phases of a rank whose device works behind its program's back, such as a GPU.
#
# A program only queues kernels, and runs ahead. By its own clock a wait for the ranks takes no time, and the whole
# backlog falls to whatever call waits first. So each mark also queues a moment on the device, and a phase lasts from
# one moment to the next. Nothing waits for a moment: a record holds the marks that the device has passed by then, and
# the others come with a later record. Where the device idles, because data are late, it passes a moment as soon as that
# is queued, so the time falls to the phase "data", as it should.


MAX_PENDING = 4096
"""Marks that wait for the device; beyond them the program's own times are taken."""


DeviceMoment: TypeAlias = Any
"""A moment of a device, queued behind its work, such as a `torch.cuda.Event` that was recorded: `query()` returns True
if the device has passed it, and `elapsed_time(later)` the milliseconds to a later one, once it has passed both."""


class DevicePhaseClock(PhaseClock):
    """A `PhaseClock` by the device's own time; where no moment can be queued, by the program's.

    `record` queues a moment on the device, or returns None where that cannot be done now.
    """

    def __init__(
        self,
        send: Callable[[object], None],
        record: Callable[[], DeviceMoment | None],
        set_activity: Callable[[int], object] | None = None,
        settings_now: Callable[[], dict[str, float | None]] = dict,
    ) -> None:
        super().__init__(send, set_activity, settings_now)
        self._record = record
        self._moments: list[DeviceMoment | None] = []
        """The moment of each mark."""
        self._waits: dict[int, DeviceMoment | None] = {}
        """By the mark of a watched backward: where its wait for the ranks began."""
        self._began_to_wait: DeviceMoment | None = None
        self._weights: list[tuple[int, int, Any]] = []
        """Of each window: its mark, its micro-batches and its weight, which may still be on its way from the device."""
        self._last: tuple[DeviceMoment | None, float] = None, 0.0
        """The last moment that was read, with its time by the program's clock."""
        self._is_ending = False
        self.note, self.note_window = self._queue_mark, self._queue_window

    def _queue_mark(self, mark: Mark) -> None:
        """Note a mark, and queue its moment."""
        self._moments.append(self._record())
        self._marks.extend(mark)

    def _queue_window(self, window: tuple[int, Any]) -> None:
        """Note a window that ended with the last mark; a weight on the device is read when it has arrived."""
        micro_batches, weight = window
        if isinstance(weight, torch.Tensor):
            self._weights.append((len(self._moments), micro_batches, weight.to("cpu", non_blocking=True)))
            self.mark(None)  # Its moment shows that the weight has arrived.
        elif self._moments:
            self._weights.append((len(self._moments) - 1, micro_batches, weight))
        else:
            self._windows.append(window)

    def attend(self, now: float, *, syncs: bool) -> bool:
        """Do what is due at the begin of a backward; return True if the backward is to be watched."""
        self._began_to_wait = None
        return super().attend(now, syncs=syncs)

    def mark_computed(self) -> None:
        """Mark that all gradients of a watched backward are queued, and then the wait for the ranks."""
        super().mark_computed()
        self._began_to_wait = self._record()

    def end_watched(self) -> None:
        """Note where the device begins to wait for the ranks in a watched backward, whose mark comes next."""
        self._waits[len(self._moments)] = self._began_to_wait
        super().end_watched()

    def flush(self) -> None:
        """Send all measurements; where the device is not done, as after a failure, the program's times stand in."""
        self._is_ending = True
        super().flush()
        self._is_ending, self._last = False, (None, 0.0)

    def _report(self, now: float) -> None:
        # While a CUDA graph is captured no moment can be queued, and to ask whether one is passed ends the capture.
        is_capturing = self._moments[-1:] == [None] and any(moment is not None for moment in self._moments)
        if self._is_ending or not is_capturing:
            super()._report(now)

    def _take(self) -> tuple[list[Phase | None], list[float]]:
        """Take the marks that the device has passed."""
        phases: list[Phase | None] = []
        ends: list[float] = []
        takes_all = self._is_ending or len(self._moments) > MAX_PENDING
        num_passed, done = _count_passed(self._moments), 0
        for phase, queued, moment in zip(self._marks[::2], self._marks[1::2], self._moments, strict=True):
            passed = done < num_passed
            if not (passed or takes_all):
                break
            since = self._last[1]
            now = self._time_of(moment if passed else None, queued)
            if phase == "synced backward":
                phases += SYNCED_BACKWARD
                ends += self._begin_of_wait(done, since, now, passed=passed), now
            else:
                phases.append(phase)
                ends.append(now)
            done += 1
        self._forget(done)
        return phases, ends

    def _forget(self, done: int) -> None:
        """Forget the first marks, which are read, and count the windows that ended with them."""
        self._windows += [
            (count, _arrived(weight, self._moments[mark])) for mark, count, weight in self._weights if mark < done
        ]
        self._weights = [(mark - done, count, weight) for mark, count, weight in self._weights if mark >= done]
        self._waits = {mark - done: moment for mark, moment in self._waits.items() if mark >= done}
        del self._moments[:done], self._marks[: 2 * done]

    def _time_of(self, moment: DeviceMoment | None, queued: float) -> float:
        """Return the time of a moment that was queued at a time of the program, which it cannot be before."""
        before, since = self._last
        elapsed = _seconds(before, moment) if before is not None and moment is not None else 0.0
        now = max(queued, since + elapsed)
        self._last = moment, now
        return now

    def _begin_of_wait(self, mark: int, since: float, now: float, *, passed: bool) -> float:
        """Return when the wait that ends with this mark began: measured, or by the share of the last one measured."""
        began, end = self._waits.get(mark), self._moments[mark]
        if passed and began is not None and end is not None:
            self._sync_share = min(1.0, _seconds(began, end) / max(now - since, 1e-9))
        return since + (now - since) * (1.0 - self._sync_share)


def _count_passed(moments: Sequence[DeviceMoment | None]) -> int:
    """Return how many moments from the first on the device has passed; it passes them in order, and asking costs 2 us.

    On several streams the order may be another; of a pair of moments that are not both passed no time is known.
    """
    queued = [(mark, moment) for mark, moment in enumerate(moments) if moment is not None]
    num_passed = bisect.bisect_left(queued, True, key=lambda entry: not _has_passed(entry[1], if_dead=True))
    return queued[num_passed][0] if num_passed < len(queued) else len(moments)


def _has_passed(moment: DeviceMoment, *, if_dead: bool) -> bool:
    try:
        return bool(moment.query())
    except RuntimeError:  # The context is dead: nothing will be measured any more.
        return if_dead


def _arrived(weight: Any, end: DeviceMoment | None) -> float:
    """Return the weight of a window that ended at a moment; 0 where it did not come from the device, or cannot be."""
    if isinstance(weight, torch.Tensor) and (end is None or not _has_passed(end, if_dead=False)):
        return 0.0
    number = float(weight)
    return number if math.isfinite(number) else 0.0


def _seconds(start: DeviceMoment, end: DeviceMoment) -> float:
    try:
        return max(0.0, float(start.elapsed_time(end)) / 1000)
    except RuntimeError:  # The context is dead, or the moments are of two devices.
        return 0.0
