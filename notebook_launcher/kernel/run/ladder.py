"""Stopping is a ladder: ask, interrupt, SIGTERM, SIGKILL, each rung with a budget.

The rungs:

    ask         the stop flag is raised; a rank that calls `report`, `track` or an Accelerator stops at its next step
                boundary; skipped if no rank does
    interrupt   SIGINT: `KeyboardInterrupt` in Python code, `finally` blocks run
    terminate   SIGTERM: ends a process that sits in C code, unless it handles the signal
    kill        SIGKILL to the rank's whole session
"""

from __future__ import annotations

import dataclasses
import enum
import math
import signal

__all__ = ["FAILURE_BUDGETS", "USER_BUDGETS", "Ladder", "Rung"]


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


@dataclasses.dataclass(slots=True)
class Ladder:
    """A stop under way: its present rung and the time that is left on it."""

    started: float
    """Time at which the stop began, by `time.monotonic()`."""
    budgets: dict[Rung, float]
    """By rung: seconds until the next rung; a rung without a budget is the last one."""
    rung: Rung
    """The present rung."""
    deadline: float
    """Time at which the present rung's budget is spent and `climb` is due."""

    @classmethod
    def start(cls, now: float, budgets: dict[Rung, float], *, can_ask: bool = False) -> Ladder:
        """Return a ladder on its first rung."""
        rung = Rung.ASK if can_ask else Rung.INTERRUPT
        return cls(started=now, budgets=budgets, rung=rung, deadline=now + budgets.get(rung, 0.0))

    def climb(self, now: float, *, to_top: bool = False) -> None:
        """Go to the next rung, or directly to the last one."""
        rungs = list(Rung)
        self.rung = Rung.KILL if to_top else rungs[min(rungs.index(self.rung) + 1, len(rungs) - 1)]
        self.deadline = now + self.budgets[self.rung] if self.rung in self.budgets else math.inf
