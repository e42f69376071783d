"""Period in which a rank's main thread has not moved, told from its process's counters and a few stacks."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from notebook_launcher.kernel.inspection.gpu_waits import CUDA_WAIT
from notebook_launcher.kernel.inspection.stacks import GROUP_CALLS

if TYPE_CHECKING:
    from notebook_launcher.engines.gauges import Pulse
    from notebook_launcher.kernel.inspection.stacks import RankStack, ThreadStack

__all__ = ["Standstill"]

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
IDLE_SHARE, IDLE_TICKS = 0.05, 2
"""Processor time that an idle process may use: this share of the time, and 2 ticks, the clock's resolution."""
SPIN_SAMPLES = 3
"""Equal stacks in a row after which a thread that uses the processor counts as waiting: NCCL waits in a loop."""
FORGIVEN = 2
"""Looks in which a move is ignored, because the launcher's own request for a stack wakes the thread."""


@dataclasses.dataclass(slots=True)
class Standstill:
    """Period in which a rank's main thread has not moved."""

    since: float
    """Its beginning, by `time.monotonic()`."""
    sample_after: float
    """Age in seconds at which the rank is asked for its stack."""
    first: Pulse
    """The activity of the rank's process at the beginning, against which its use of the processor is measured."""
    last: Pulse
    """Its activity at the last look."""
    num_forgiven: int = 0
    """Further looks at which a move does not end the period."""
    main: ThreadStack | None = None
    """The main thread's stack in the last sample; None before the first."""
    num_alike: int = 0
    """Samples in a row that showed the same stack."""

    def goes_on(self, pulse: Pulse) -> bool:
        """Return True if the thread is where it was at the last look."""
        is_same_state = pulse.is_asleep == self.last.is_asleep
        if is_same_state and (pulse.num_sleeps == self.last.num_sleeps or self.num_forgiven):
            self.last, self.num_forgiven = pulse, 0
            return True
        self.num_forgiven -= 1
        return self.num_forgiven >= 0

    def forgive(self) -> None:
        """Ignore the moves that a request for a stack causes."""
        self.num_forgiven = FORGIVEN

    def is_due(self, now: float) -> bool:
        """Return True if the rank is to be asked for its stack."""
        return now - self.since >= self.sample_after

    def note(self, stack: RankStack, now: float) -> None:
        """Record a sample, and put the next one off for twice as long, if it was due."""
        self.num_alike = self.num_alike + 1 if stack.main == self.main else 1
        self.main = stack.main
        self.forgive()
        if self.is_due(now) and (self.last.is_asleep or not _is_in_call(stack) or self.num_alike >= SPIN_SAMPLES):
            self.sample_after *= 2

    def is_idle(self, now: float) -> bool:
        """Return True if no thread of the process has done anything that counts."""
        allowed = IDLE_TICKS + IDLE_SHARE * TICKS_PER_SECOND * (now - self.since)
        return self.last.ticks - self.first.ticks <= allowed

    def is_wait(self, stack: RankStack, now: float) -> bool:
        """Return True if the thread has waited for other ranks all the time."""
        if not self.last.is_asleep:
            # It may have left the collective and entered it again without sleeping.
            return _is_in_call(stack) and self.num_alike >= SPIN_SAMPLES
        # A backward pass may be computed by another thread of the process.
        return stack.waiting_in is not None and (_is_in_call(stack) or self.is_idle(now))


def _is_in_call(stack: RankStack) -> bool:
    """Return True if the stack names a wait, and not only a place where ranks may wait."""
    return stack.waiting_in in GROUP_CALLS or stack.waiting_in == CUDA_WAIT
