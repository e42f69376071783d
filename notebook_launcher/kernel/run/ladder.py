"""Stopping is a ladder: ask, interrupt, SIGTERM, SIGKILL, each rung with a budget.

The rungs:

    ask         the stop flag is raised; a rank that calls `report`, `track` or an Accelerator stops at its next step
                boundary; skipped if no rank does
    interrupt   SIGINT: `KeyboardInterrupt` in Python code, `finally` blocks run
    terminate   SIGTERM: ends a process that sits in C code, unless it handles the signal
    kill        SIGKILL to the rank's whole session

Whoever sends SIGKILL to the ranks may be stopped or hang. So every stop has a deadline, too: then the supervisors are
killed, and a moment later the run ends with what is known.
"""

from __future__ import annotations

import contextlib
import enum
import math
import signal
import time
from typing import TYPE_CHECKING

from notebook_launcher.engines.engine import starting_until
from notebook_launcher.errors import ConfigError, RunTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rung(enum.Enum):
    """One step of a stop; each is harder to resist than the step before."""

    ASK = "ask"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    KILL = "kill"

    @property
    def signum(self) -> int | None:
        """The signal of this rung."""
        return {
            Rung.ASK: None,
            Rung.INTERRUPT: signal.SIGINT,
            Rung.TERMINATE: signal.SIGTERM,
            Rung.KILL: signal.SIGKILL,
        }[self]


USER_BUDGETS = {Rung.ASK: 0.5, Rung.INTERRUPT: 1.0, Rung.TERMINATE: 0.5}
"""Seconds; together 2.0, so that a stop takes under 3 s even if every rank ignores every signal."""
FAILURE_BUDGETS = {Rung.INTERRUPT: 0.4, Rung.TERMINATE: 0.3}
"""Seconds after a failure. The peers' work is lost then, and the error should be in the cell in under 2 s."""
SESSION_FAILURE_BUDGETS = {Rung.INTERRUPT: 1.4, Rung.TERMINATE: 0.3}
"""The same in a session, where a rank that is killed because it was in C code for a moment loses the user's memory."""

STOP_BUDGET = 4.0
"""Seconds from the beginning of a user's stop, or from a limit, until what has not ended is given up."""
AT_ONCE_BUDGET = 2.0
"""Seconds from the request to kill the ranks until they are given up."""
FAILED_BUDGET = 10.0
"""Seconds from the stop after a failure until what has not ended is given up: to free a GPU takes long."""
LAST_BUDGET = 0.4
"""Seconds from the end of such a budget, when the supervisors are killed, until the run ends with what is known."""


class Ladder:
    """A stop under way: its present rung and the time that is left on it.

    `budgets`: by rung, the seconds until the next rung; a rung without a budget is the last one.
    """

    rung: Rung
    """The present rung."""
    deadline: float
    """Time at which the present rung's budget is spent and `climb` is due."""

    def __init__(self, now: float, budgets: dict[Rung, float], rung: Rung = Rung.INTERRUPT) -> None:
        self.started = now
        """Time at which the stop began, by `time.monotonic()`."""
        self._budgets = budgets
        self.climb_to(rung, now)

    def climb(self, now: float) -> None:
        """Go to the next rung."""
        rungs = list(Rung)
        self.climb_to(rungs[min(rungs.index(self.rung) + 1, len(rungs) - 1)], now)

    def climb_to(self, rung: Rung, now: float) -> None:
        """Go to a rung, past those before it."""
        self.rung = rung
        self.deadline = now + self._budgets.get(rung, math.inf)


# --------------------------------------------------------------------------------------------------------------------
# The limit on a run's time while its nodes come up.


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
