"""State of runs and sessions that users do not see, read in one place for all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_launcher import Run, Session
    from notebook_launcher.kernel.run.data import RunData


def data_of(run: Run) -> RunData:
    """Return all that the kernel knows of a run."""
    return run._data


def tree_of(session: Session) -> Any:
    """Return the tree of a session's ranks."""
    return session._runs.ranks.tree
