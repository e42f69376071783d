"""Advice for where the system refuses what a rank or a thread needs."""

from __future__ import annotations

import errno

__all__ = ["describe_limit", "describe_process_limit"]


def describe_limit(number: int | None, *, on_node: bool = False) -> str:
    """Return what to do after an error of the system; empty if the number alone does not tell.

    Args:
        number: `OSError.errno`.
        on_node: True if another machine than the notebook's has the limit.
    """
    match number:
        case errno.EMFILE | errno.ENFILE:
            where = "on that machine" if on_node else "in the shell that starts Jupyter"
            return (
                "A launch needs 6 descriptors for each rank while it starts, and `ulimit -n` shows the limit: "
                f"use fewer ranks, or raise it {where}."
            )
        case errno.EAGAIN | errno.ENOMEM:
            return describe_process_limit()
        case errno.E2BIG:
            return "The environment is too large for a new process: see os.environ and env=."
    return ""


def describe_process_limit(*, for_threads: bool = False) -> str:
    """Return which limits may be reached, and what to do; `for_threads`: it was a thread that could not start."""
    counts = ", which counts threads," if for_threads else ""
    memory = ", or the limit on memory (`ulimit -v`)" if for_threads else ""
    return (
        f"The limit on processes{counts} may be reached (`ulimit -u`, or the container's pids limit){memory}. "
        "Use fewer ranks, or stop other processes."
    )
