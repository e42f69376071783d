"""Mending of a session's ranks: processes that ended or became useless, and a process group that broke."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from notebook_launcher.kernel.ranks import describe_restart

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.engines.events import Event
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.kernel.run.data import RunData

__all__ = ["mend", "replace_the_dead"]

DEATH_NOTICE = 1.0
"""Longest wait in seconds for the supervisor's report of a rank's end, once the rank's channel has closed."""


def replace_the_dead(data: RunData, ranks: Ranks, attempt: Attempt, handle: Callable[[Event], None]) -> None:
    """Replace ranks of a session that died between two runs.

    Args:
        data: The run data, for notices.
        ranks: The ranks of the session.
        attempt: The attempt that is about to begin.
        handle: Takes each event of the process tree that arrives meanwhile.
    """
    tree, until = attempt.tree, time.monotonic() + DEATH_NOTICE
    while (events := tree.events(0)) or (tree.is_dying and time.monotonic() < until):
        for event in events or tree.events(DEATH_NOTICE):
            handle(event)
    if attempt.state.outcomes and not attempt.state.tree_lost:
        mend(data, ranks, attempt, handle)
        attempt.forget_outcomes(ranks.generation)


def mend(data: RunData, ranks: Ranks, attempt: Attempt, handle: Callable[[Event], None]) -> None:
    """Make a session's ranks ready for the next call, and show a notice if they lost something.

    Args:
        data: The run data, for notices.
        ranks: The ranks of the session.
        attempt: The attempt that is over.
        handle: Takes each event of the process tree that arrives meanwhile.
    """
    _remove_the_spent(attempt, handle)
    replaced = ranks.replace_ended(attempt)
    if replaced:
        in_nccl = attempt.ladder is not None and "nccl" in (attempt.tree.setup.backend or "")
        data.output.notice(describe_restart(replaced, stopped_in_nccl=in_nccl))
    elif attempt.state.broke_group:
        data.output.notice(
            "the next run makes a new process group: models that the ranks keep must be wrapped again "
            "(DistributedDataParallel, Accelerator.prepare)"
        )


def _remove_the_spent(attempt: Attempt, handle: Callable[[Event], None]) -> None:
    """End ranks that no later call can use: their GPU context was lost, or they have no descriptor left."""
    spent = tuple(rank for rank, outcome in attempt.state.outcomes.items() if outcome.is_spent)
    if not spent:
        return
    attempt.tree.signal(spent, signal.SIGKILL)
    until = time.monotonic() + DEATH_NOTICE
    while any(attempt.state.outcomes[rank].is_spent for rank in spent) and (left := until - time.monotonic()) > 0:
        for event in attempt.tree.events(left):
            handle(event)
