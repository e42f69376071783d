"""The runs of a session: its ranks, and the latest of the runs that they serve one after the other."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from notebook_launcher.kernel.failures.post_mortem import frames_to_debug
from notebook_launcher.kernel.ranks import Ranks
from notebook_launcher.kernel.run.exits import EXIT_BUDGET
from notebook_launcher.kernel.run.handle import data_of

if TYPE_CHECKING:
    from notebook_launcher.kernel.plan import Plan
    from notebook_launcher.kernel.run.data import RunData
    from notebook_launcher.kernel.run.handle import Run

__all__ = ["SessionRuns"]


class SessionRuns:
    """The ranks of a session, and the latest of their runs, in a kernel or in a host.

    Args:
        plan: The options of all runs, resolved against the machine.
    """

    def __init__(self, plan: Plan) -> None:
        self.ranks = Ranks(plan, many_calls=True)
        """The processes of all runs."""
        self.lock = threading.Lock()
        """Held while a run is begun, so that two threads or clients cannot begin one each."""
        self.latest: Run | None = None
        """The latest run."""
        self.is_closed = False
        """True once no run may begin any more."""
        self.in_haste = False
        """True if ranks get no time for their exit handlers at the end."""
        self._has_forgotten = False
        """True if the ranks have released the frames of the latest run."""

    @property
    def plan(self) -> Plan:
        """The options of all runs, resolved against the machine."""
        return self.ranks.plan

    @property
    def is_busy(self) -> bool:
        """True while the latest run goes on."""
        return self.latest is not None and not self.latest.wait(0)

    @property
    def is_at_rest(self) -> bool:
        """True if the ranks are up and idle, and the latest run did not fail."""
        if self.is_closed or self.ranks.tree is None or self.is_busy:
            return False
        return self.latest is None or self.latest.exception() is None

    def note(self, run: Run) -> None:
        """Take a run that has begun as the latest."""
        self.latest, self._has_forgotten = run, False

    def frames_to_debug(self, rank: int | None) -> tuple[RunData, int]:
        """Return the latest run, which is over, and the rank to look into; raises as `frames_to_debug`."""
        data = None if self.latest is None else data_of(self.latest)
        return frames_to_debug(data, rank, has_forgotten=self._has_forgotten)

    def forget_failures(self) -> None:
        """Have the ranks release what they keep for a debugger: the frames of the latest run, with their tensors."""
        self._has_forgotten = True
        self.ranks.forget_failures()

    def end(self) -> None:
        """Stop a run that goes on, have the ranks exit, and show what they write meanwhile."""
        try:
            if self.latest is not None:
                self.latest.stop()
            deadline = time.monotonic() + EXIT_BUDGET
            for events in self.ranks.finish(lambda: 0.0 if self.in_haste else deadline):
                if self.latest is not None:
                    self.latest.show_late_output(events)
        finally:
            self.ranks.close()
