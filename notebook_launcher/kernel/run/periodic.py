"""Parts of a run that have work of their own at certain times, and not only when something happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.kernel.run.attempt import Attempt

__all__ = ["Periodic"]


class Periodic(NamedTuple):
    """A part of a run that the run's thread drives, as two functions of the time and, for its work, of the attempt."""

    next_due: Callable[[float], float | None]
    """Returns the seconds until `tick` has something to do; None: nothing, unless an event comes."""
    tick: Callable[[float, Attempt], object]
    """Does what is due; takes the time, by `time.monotonic()`."""
