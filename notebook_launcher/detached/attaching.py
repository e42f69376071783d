"""`attach(...)`: come back to a detached run, from any kernel or script of the same user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.archive.listing import open_run, runs
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.detached.door import is_hosted
from notebook_launcher.kernel.checks import check_not_in_rank

if TYPE_CHECKING:
    import os
    from pathlib import Path

__all__ = ["attach"]


def attach(
    run: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] = "auto",
    since: float | None = None,
    show: bool = True,
) -> AttachedRun:
    """Return the handle on a detached run, and show the run in this cell or terminal.

    Any number of kernels and terminals may be attached to a run, also after its end, for its results.

    Args:
        run: The run's id, the beginning of its id, or the path of its folder. None: the latest detached run.
        folder: The folder that holds the runs' folders. `"auto"`: see `LaunchConfig.runs_folder`.
        since: Seconds before now, from which on its output is shown. None: from the beginning.
        show: False: show nothing.

    Raises:
        LookupError: There is no such run, or it was not launched with `detached=True`.
        CallOrderError: The run's host is of a version of this package with another protocol.
    """
    check_not_in_rank("attach")
    attached = AttachedRun(_latest(folder) if run is None else _one(run, folder))
    if show:
        attached.follow_in_cell(since)
    return attached


def _one(run: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    record = open_run(run, folder)
    if not is_hosted(record.folder):
        msg = (
            f"{record.id} was not launched with detached=True, so it belongs to its kernel: run = launch(...) there. "
            f"open_run({record.id!r}) reads what it has recorded."
        )
        raise LookupError(msg)
    return record.folder


def _latest(folder: str | os.PathLike[str]) -> Path:
    every = runs(folder)
    for record in every:
        if is_hosted(record.folder):
            return record.folder
    msg = f"there is no detached run in {every.home}. launch(fn, 2, detached=True) starts one."
    raise LookupError(msg)
