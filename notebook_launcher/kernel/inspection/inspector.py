"""Looks into the ranks of a run while it goes on: their stacks, samples of these, and hangs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from notebook_launcher.kernel.inspection.hangs import HangWatch
from notebook_launcher.kernel.inspection.stacks import Stacks

if TYPE_CHECKING:
    from notebook_launcher.kernel.inspection.hangs import Hang
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.kernel.run.data import RunData


class RankInspector:
    """Reads the stacks of a run's ranks and notices hangs; used in the run's thread alone.

    Args:
        data: The run data, which the inspector only reads.
    """

    def __init__(self, data: RunData) -> None:
        self._data = data
        self._hangs = HangWatch(None)
        """Replaced at each attempt, since an attempt begins with nothing known of its ranks."""

    def begin(self) -> None:
        """Forget the ranks of an earlier attempt."""
        data = self._data
        # A single rank has no other rank to wait for.
        notice_after = data.scope.notice_after(data.plan.config.hang_notice) if data.plan.num_processes > 1 else None
        self._hangs = HangWatch(notice_after, time.monotonic(), uses_gpu=data.plan.use_gpu)

    @property
    def hang(self) -> Hang | None:
        """The ranks that wait in a collective which others have not entered; None if there are none."""
        return self._hangs.hang

    def next_due(self, now: float) -> float | None:
        """Return the seconds until `watch` has something to do; None if it has nothing to do."""
        return self._hangs.next_due(now)

    def watch(self, attempt: Attempt) -> str:
        """Look for a hang, if that is due, and bring `hang` up to date; return a line for the cell, or nothing."""
        now = time.monotonic()
        if attempt.is_ending or self._data.asking or attempt.requests.paused_after is not None:
            self.forget_hang()
            return ""
        tree = attempt.tree
        return self._hangs.poll(now, lambda: tree.pulses(attempt.state.running), attempt.state.absent, tree.stacks.dump)

    def forget_hang(self) -> None:
        """Forget the hang, because the ranks are about to end or have a reason to wait."""
        self._hangs.reset()

    def read_stacks(self, attempt: Attempt) -> Stacks:
        """Have all ranks write their stacks; wait for the stacks and return them."""
        stacks = Stacks.parse(attempt.tree.stacks.dump(), uses_gpu=self._data.plan.use_gpu)
        self._hangs.forgive()
        return stacks

    def take_sample(self, attempt: Attempt) -> dict[int, int]:
        """Have all ranks write their stacks, without waiting; return the positions in their files before that."""
        positions = attempt.tree.stacks.sizes()
        attempt.tree.stacks.request()
        self._hangs.forgive()
        return positions
