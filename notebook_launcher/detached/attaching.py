"""`runs()`, and `attach(...)` and `attach_session(...)`, which come back to a detached run or session from anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.archive.listing import LAST, RunList, open_run, require_home, stored_runs
from notebook_launcher.detached.attached_run import AttachedRun
from notebook_launcher.detached.attached_session import AttachedSession
from notebook_launcher.detached.host_socket import HostSilentError
from notebook_launcher.detached.session_folders import live_sessions
from notebook_launcher.history.run_folders import goes_on, is_hosted, is_session
from notebook_launcher.kernel.calls.checks import check_not_in_rank
from notebook_launcher.tracebacks import for_caller

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path


def attach(
    run: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] = "auto",
    since: float | None = None,
    show: bool = True,
) -> AttachedRun:
    """Return the handle on a detached run, and show the run in this cell or terminal.

    Any number of kernels and terminals may be attached to a run, even after its end, for its results.

    Args:
        run: The run's id, the beginning of its id, or the path of its folder. None and `"last"` mean the latest
            detached run.
        folder: The folder that holds the runs' folders. `"auto"`: see `LaunchConfig.runs_folder`.
        since: Age in seconds of the oldest output that is shown. None: all output.
        show: False: show nothing.

    Raises:
        LookupError: There is no such run, or it was not launched with `detached=True`.
        CallOrderError: The run's host is of a version of this package with another protocol.
        TimeoutError: The run's host does not answer; it may be stopped (SIGSTOP).
    """
    check_not_in_rank("attach")
    attached = AttachedRun(_latest(folder) if run in (None, LAST) else _one(run, folder))
    attached.check_protocol()
    if show:
        attached.follow_in_cell(since)
    return attached


def attach_session(
    name: str | None = None, *, folder: str | os.PathLike[str] = "auto", show: bool = True
) -> AttachedSession:
    """Return a detached session, whose ranks have kept their memory, and show its running call, if there is one.

    Any number of kernels and terminals may be attached to a session. Its ranks carry out one call at a time.

    Args:
        name: The session's name, or its id or the beginning of its id. None: the latest session that is open.
        folder: The folder that holds the runs' folders. `"auto"`: see `LaunchConfig.runs_folder`.
        show: False: show nothing.

    Raises:
        LookupError: No such session is open.
        CallOrderError: The session's host is of a version of this package with another protocol.
        TimeoutError: The session's host does not answer; it may be stopped (SIGSTOP).
    """
    check_not_in_rank("attach_session")
    session = find_session(name, folder=folder)
    if session is None:
        raise for_caller(LookupError(_why_no_session(name, runs(folder).home)))
    if show and session.is_busy and (call := session.latest) is not None:
        call.follow_in_cell()
    return session


def find_session(name: str | None, *, folder: str | os.PathLike[str]) -> AttachedSession | None:
    """Return the newest session that is open under a name, an id or the beginning of an id; None if there is none."""
    for path, its_name in live_sessions(runs(folder).home):
        if name is None or name == its_name or (name and path.name.startswith(name)):
            return AttachedSession(path)
    return None


def _why_no_session(name: str | None, home: Path) -> str:
    names = [its_name for _, its_name in live_sessions(home)]
    wanted = "no detached session" if name is None else f"no detached session {name!r}"
    others = f"Open are {', '.join(map(repr, names))}." if names else "Session(4, name='exp', detached=True) opens one."
    return f"{wanted} is open in {home}. {others}"


def _one(run: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    recorded = open_run(run, folder)
    if is_session(recorded.folder):
        msg = f"{recorded.id} is a session, and not a run: attach_session({recorded.name!r}) reconnects to it."
        raise for_caller(LookupError(msg))
    if not is_hosted(recorded.folder):
        msg = (
            f"{recorded.id} was not launched with detached=True, so it belongs to its kernel: live_runs() there "
            f"returns its handle while it runs. open_run({recorded.id!r}) reads what it has recorded."
        )
        raise for_caller(LookupError(msg))
    return recorded.folder


def _latest(folder: str | os.PathLike[str]) -> Path:
    every = runs(folder)
    for recorded in every:
        if is_hosted(recorded.folder):
            return recorded.folder
    msg = f"there is no detached run in {every.home}. launch(fn, 2, detached=True) starts one."
    raise for_caller(LookupError(msg))


# --------------------------------------------------------------------------------------------------------------------
# `runs()` lists the runs that have left a folder, and can stop detached ones.


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
    silent: list[HostSilentError] = []
    stopping: list[AttachedRun] = []
    num_closed = 0
    for folder in folders:
        try:
            if goes_on(folder):
                stopping.append(AttachedRun(folder))
                stopping[-1].stop(wait=False)
        except HostSilentError as error:  # noqa: PERF203 - the others are stopped first
            silent.append(error)
            stopping.pop()
    for run in stopping:
        run.wait()
    for folder in filter(is_session, folders):
        try:
            AttachedSession(folder).close()
            num_closed += 1
        except HostSilentError as error:  # noqa: PERF203 - as above
            silent.append(error)
    if silent:
        raise silent[0]
    return len(stopping) + num_closed
