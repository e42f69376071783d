"""Advice for where the system starts no further process or thread."""

from __future__ import annotations

__all__ = ["describe_process_limit"]


def describe_process_limit(*, for_threads: bool = False) -> str:
    """Return which limits may be reached, and what to do; `for_threads`: it was a thread that could not start."""
    counts = ", which counts threads," if for_threads else ""
    memory = ", or the limit on memory (`ulimit -v`)" if for_threads else ""
    return (
        f"The limit on processes{counts} may be reached (`ulimit -u`, or the container's pids limit){memory}. "
        "Use fewer ranks, or stop other processes."
    )
