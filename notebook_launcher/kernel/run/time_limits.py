"""The limits on a run's time: how long it may take, and how long its ranks may do nothing."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

from notebook_launcher.engines.engine import starting_until
from notebook_launcher.errors import ConfigError, RunTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["TimeLimits", "limited_start", "timeout_error"]


@contextlib.contextmanager
def limited_start(timeout: float | None, began: float) -> Iterator[None]:
    """Let nodes that are started in this block come up within the time limit of a run that began at this time.

    Raises:
        RunTimeoutError: They did not.
    """
    if timeout is None:
        yield
        return
    try:
        with starting_until(lambda: began + timeout):
            yield
    except ConfigError as error:
        if not error.nodes or time.monotonic() < began + timeout:
            raise
        raise timeout_error(timeout, str(error)) from error


def timeout_error(timeout: float, why: str) -> RunTimeoutError:
    """Return the error of a run that took too long to start, for this reason."""
    return RunTimeoutError(f"the run was stopped: it had not ended after timeout={timeout:g} s. {why}")


class TimeLimits:
    """The two limits of one attempt; all times are by `clock`.

    Args:
        deadline: Time at which the run has taken too long; None: never.
        idle_timeout: Seconds without a sign of life from any rank after which the run counts as idle; None: never.
        clock: Returns the time.
    """

    def __init__(self, deadline: float | None, idle_timeout: float | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = math.inf if deadline is None else deadline
        self._idle_timeout = math.inf if idle_timeout is None else idle_timeout
        self._active_at = clock()
        """Time at which a rank last sent something."""
        self._held_at: float | None = None
        """Time since which the clock of the deadline stands still; None while it runs."""

    @property
    def deadline(self) -> float:
        """Time at which the run has taken too long; infinity: never."""
        return self._deadline

    def note_activity(self) -> None:
        """Note that a rank sent something just now."""
        self._active_at = self._clock()

    def hold(self) -> None:
        """Stop the clock of the deadline until `release`; idempotent."""
        if self._held_at is None:
            self._held_at = self._clock()

    def release(self) -> None:
        """Let the clock of the deadline run on; idempotent."""
        if self._held_at is not None:
            self._deadline += self._clock() - self._held_at
            self._held_at = None

    def next_at(self, *, has_begun: bool) -> float:
        """Return the time at which a limit is reached; infinity if none will be.

        Args:
            has_begun: True once a rank runs the function; until then the run is never idle, as the start may take long.
        """
        return min(self._idle_at if has_begun else math.inf, self._deadline if self._held_at is None else math.inf)

    def is_idle(self, now: float, *, has_begun: bool) -> bool:
        """Return True if the ranks have done nothing for too long; `has_begun` as above."""
        return has_begun and now >= self._idle_at

    @property
    def _idle_at(self) -> float:
        return self._active_at + self._idle_timeout
