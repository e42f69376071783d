"""`runs()` lists the runs that have left a folder, and can stop detached ones."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from notebook_launcher.archive.listing import RunList, require_home, stored_runs
from notebook_launcher.history.run_folders import goes_on, is_session

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path


def runs(folder: str | os.PathLike[str] = "auto") -> RunList:
    """Return the runs that have left a folder, also runs of other kernels and runs that are not over.

    Args:
        folder: The folder that holds the runs' folders. `"auto"`: see `LaunchConfig.runs_folder`.

    Returns:
        A sequence of `RecordedRun`, the newest first, which a notebook shows as a table; empty if there is no folder.

    Raises:
        LookupError: `folder` is `"auto"`, and recording of runs is off.
        RuntimeError: `folder` is `"auto"`, and the user has no home folder.
    """
    home = require_home(folder)
    return RunList(home, stored_runs(home), stop_hosted)


def stop_hosted(folders: Sequence[Path]) -> int:
    """Stop the detached runs and close the detached sessions in these folders; return their number.

    Raises:
        HostSilentError: A host does not answer; the others were stopped before.
    """
    from notebook_launcher.detached.attached_run import AttachedRun
    from notebook_launcher.detached.attached_session import AttachedSession
    from notebook_launcher.detached.host_socket import HostSilentError

    silent: list[HostSilentError] = []

    def carried_out(action: Callable[[], object]) -> bool:
        try:
            action()
        except HostSilentError as error:
            silent.append(error)
            return False
        return True

    def close(folder: Path) -> None:
        AttachedSession(folder).close()

    live = [AttachedRun(folder) for folder in folders if goes_on(folder)]
    stopping = [run for run in live if carried_out(functools.partial(run.stop, wait=False))]
    for run in stopping:
        run.wait()
    closed = [folder for folder in folders if is_session(folder) and carried_out(functools.partial(close, folder))]
    if silent:
        raise silent[0]
    return len(stopping) + len(closed)
