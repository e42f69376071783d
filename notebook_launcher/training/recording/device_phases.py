"""The phases of a rank whose device works behind its program's back, such as a GPU.

A program only queues kernels, and runs ahead. By its own clock a wait for the ranks takes no time, and the whole
backlog falls to whatever call waits first. So each mark also queues a moment on the device, and a phase lasts from one
moment to the next. Nothing waits for a moment: a record holds the marks that the device has passed by then, and the
others come with a later record. Where the device idles, because data are late, it passes a moment as soon as that is
queued, so the time falls to the phase "data", as it should.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from notebook_launcher.training.queued_work import mark_queued_work
from notebook_launcher.training.recording.phases import SYNCED_BACKWARD, Mark, Phase, PhaseClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_PENDING = 4096
"""Marks that wait for the device; beyond them the program's own times are taken."""


class DeviceMoment(Protocol):
    """A moment of a device, queued behind its work, such as a `torch.cuda.Event` that was recorded."""

    def query(self) -> bool:
        """Return True if the device has passed it."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from here to a later moment; the device must have passed both."""
        ...


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
    num_passed = bisect.bisect_left(queued, True, key=lambda entry: not _has_passed(entry[1]))
    return queued[num_passed][0] if num_passed < len(queued) else len(moments)


def _has_passed(moment: DeviceMoment) -> bool:
    try:
        return moment.query()
    except RuntimeError:  # The context is dead: nothing will be measured any more.
        return True


def _arrived(weight: Any, end: DeviceMoment | None) -> float:
    """Return the weight of a window that ended at a moment; 0 where it did not come from the device, or cannot be."""
    if isinstance(weight, torch.Tensor) and not _is_behind(end):
        return 0.0
    number = float(weight)
    return number if math.isfinite(number) else 0.0


def _is_behind(moment: DeviceMoment | None) -> bool:
    """Return True if the device lives and has carried out all work that was queued before a moment."""
    try:
        return moment is not None and moment.query()
    except RuntimeError:
        return False


def _seconds(start: DeviceMoment, end: DeviceMoment) -> float:
    try:
        return max(0.0, start.elapsed_time(end) / 1000)
    except RuntimeError:  # The context is dead, or the moments are of two devices.
        return 0.0


def record_cuda_event() -> DeviceMoment | None:
    """Queue an event on the current stream; None before the process uses its GPU, and inside a captured graph."""
    return mark_queued_work(timed=True)
