"""Rates at which a rank's counts grow: over the last seconds, and over the whole run."""

from __future__ import annotations

from collections import deque

__all__ = ["Pace"]

RATE_SECONDS = 5.0
"""Seconds over which a rate is measured."""
LOOP_SECONDS = 1.0
"""Seconds after which a loop's own rate is known; a shorter one is measured together with those before it."""


class Pace:
    """Rate at which a count grows. Time in which it does not grow counts, too."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque()
        self._loop: object = None
        self._loop_since = 0.0
        """The loop that is counted now, and its first mark."""
        self._first: tuple[float, float] | None = None
        self._grown: tuple[float, float] | None = None
        """The first mark, and the last one at which the count had grown: what comes after the work does not count."""

    def note(self, time: float, count: float, loop: object = None) -> None:
        """Note the count at a time.

        Args:
            time: Time of the count, in seconds.
            count: Items so far, in all loops.
            loop: Anything that stays equal during one loop.
        """
        if loop != self._loop:
            self._loop, self._loop_since = loop, time
        if self._first is None:
            self._first = time, count
        elif count > self._marks[-1][1]:
            self._grown = time, count
        if self._marks and count < self._marks[-1][1]:
            self._marks.clear()  # Another process counts from 0.
        self._marks.append((time, count))
        while len(self._marks) > 2 and time - self._marks[1][0] > RATE_SECONDS:
            self._marks.popleft()

    def leave_out(self, since: float, until: float) -> None:
        """Leave out a pause: what was noted before it moves to its end."""

        def move(mark: tuple[float, float]) -> tuple[float, float]:
            time, count = mark
            return (time + until - since if time <= since else time), count

        self._marks = deque(map(move, self._marks))
        self._first = None if self._first is None else move(self._first)
        self._grown = None if self._grown is None else move(self._grown)
        self._loop_since, _ = move((self._loop_since, 0.0))

    def rate(self) -> float | None:
        """Return the growth per second over the last seconds; None if it is not known."""
        marks = list(self._marks)
        if not marks:
            return None
        if marks[-1][0] - self._loop_since >= LOOP_SECONDS:
            marks = [mark for mark in marks if mark[0] >= self._loop_since]
        return _growth(marks[0], marks[-1])

    def mean(self) -> float | None:
        """Return the growth per second from the first mark to the last growth; None if it is not known."""
        return None if self._first is None or self._grown is None else _growth(self._first, self._grown)


def _growth(first: tuple[float, float], last: tuple[float, float]) -> float | None:
    seconds = last[0] - first[0]
    return (last[1] - first[1]) / seconds if seconds > 0 else None
