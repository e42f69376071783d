"""The exit of a launch's ranks after the last attempt: their exit handlers run, within a limit of time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from notebook_launcher.kernel.run.ladder import AT_ONCE_BUDGET, STOP_BUDGET

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.engines.events import Event
    from notebook_launcher.kernel.ranks import Ranks
    from notebook_launcher.kernel.run.attempt import Attempt
    from notebook_launcher.kernel.run.commands import CommandQueue
    from notebook_launcher.kernel.run.data import RunData

__all__ = ["EXIT_BUDGET", "close_ranks", "end_ranks"]

EXIT_BUDGET = 5.0
"""Time limit in seconds of the ranks' exit handlers after a success."""
FAILED_EXIT_BUDGET = 0.5
"""Time limit in seconds of the ranks' exit handlers after a failure, or once the run is being stopped."""


def end_ranks(data: RunData, ranks: Ranks, attempt: Attempt, handle: Callable[[Event], None]) -> None:
    """Have the ranks run their exit handlers and exit; kill ranks that take too long, and show a notice about them.

    Args:
        data: The run data.
        ranks: The ranks, which are closed.
        attempt: The attempt that is over.
        handle: Takes each event of the process tree that arrives meanwhile.
    """
    failed, began = attempt.state.failed, time.monotonic()
    for events in ranks.finish(lambda: _deadline(data.commands, began, attempt.limit, failed=failed)):
        for event in events:
            handle(event)
        data.output.publish()
    when, hint = f"{EXIT_BUDGET:g} s after it returned", ". Finish such work in the function, a save for example"
    if data.commands.asked_to_stop:
        when, hint = "as the run was stopped", ""
    elif time.monotonic() >= attempt.limit + STOP_BUDGET:
        when, hint = "as its time was over", ""
    for rank in attempt.tree.pids:
        attempt.state.note_killed_at_exit(rank)
        if not failed:
            text = f"rank {rank} was killed: {when} it was still running exit handlers or threads{hint}"
            data.output.notice(text, "stderr")
    close_ranks(data, ranks, attempt)


def close_ranks(data: RunData, ranks: Ranks, attempt: Attempt) -> None:
    """Close the ranks of an attempt that is over; a stop of the run limits the wait for processes that do not end."""
    commands, began = data.commands, time.monotonic()

    def deadline() -> float:
        asked_at = max(began, commands.stop_asked_at)
        by_limit = max(began + FAILED_EXIT_BUDGET, attempt.limit + STOP_BUDGET)
        return min(attempt.gives_up_at, asked_at + STOP_BUDGET, commands.kill_asked_at + AT_ONCE_BUDGET, by_limit)

    ranks.close(deadline)


def _deadline(commands: CommandQueue, began: float, limit: float, *, failed: bool) -> float:
    if math.isfinite(commands.kill_asked_at):
        return began
    usual = began + (FAILED_EXIT_BUDGET if failed else EXIT_BUDGET)
    usual = min(usual, max(began + FAILED_EXIT_BUDGET, limit + STOP_BUDGET))
    return min(usual, max(began, commands.stop_asked_at) + FAILED_EXIT_BUDGET)
