"""Reading a run from whatever stands for it: a run, a recorded run, an id, a folder, or results."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.archive.recorded import RecordedRun
from notebook_launcher.errors import ConfigError
from notebook_launcher.history import run_folders
from notebook_launcher.history.curves import Curves
from notebook_launcher.history.folder_files import read_bytes
from notebook_launcher.history.schema import RankFailure, RankSnapshot, RunSnapshot
from notebook_launcher.kernel.results import Results
from notebook_launcher.wording import one_line

if TYPE_CHECKING:
    from notebook_launcher.history.schema import RunReader

__all__ = ["read_run"]


def read_run(run: Any, place: int) -> tuple[RunSnapshot, Curves, dict[str, str], RunReader | None]:
    """Return the snapshot and the curves of a run as they are now, what it began with, as text by name, and its reader.

    Args:
        run: A `Run`, a `RecordedRun`, an id, a folder, or `Results`, which have curves if the run's folder exists.
        place: Position of the argument, for the error.

    Raises:
        ConfigError: `run` is none of these.
        LookupError: No run with this id has left a folder.
    """
    if isinstance(run, (str, os.PathLike)):
        from notebook_launcher.archive.listing import open_run

        run = open_run(run)
    if isinstance(run, Results):
        if run.folder is None or not run.folder.is_dir():
            return _snapshot_of(run, place), Curves(), {}, None
        run = RecordedRun(run.folder)
    if not all(callable(getattr(run, name, None)) for name in ("snapshot", "metrics_since")) or isinstance(run, type):
        raise ConfigError(_no_run(run, place))
    curves = Curves()
    curves.fold(run.metrics_since(0)[0])
    snapshot = run.snapshot()
    return snapshot, curves, _beginning(getattr(run, "folder", None) or _folder_of(snapshot)), run


def _folder_of(snapshot: RunSnapshot) -> Path | None:
    """Return the folder of a run in this process; it may not exist."""
    home = run_folders.find_home(snapshot.config.get("runs_folder", "auto"))
    return home and home / snapshot.id


def _beginning(folder: Path | None) -> dict[str, str]:
    """Return random states, code and versions of a run with a folder; a few digits of a digest stand for a file."""
    if folder is None or not Path(folder).is_dir():
        return {}
    recorded = RecordedRun(folder)
    environment = recorded.environment
    git = environment.get("git") or {}
    packages = environment.get("packages") or {}
    found = {
        "random states": _digest(folder, run_folders.RANDOM),
        "code": _digest(folder, run_folders.SOURCE),
        "git commit": str(git.get("commit") or "")[:10],
        "changes since the commit": _digest(folder, run_folders.CHANGES),
        "Python": str(environment.get("python") or ""),
    }
    found |= {f"version of {name.replace('_', '-')}": str(version) for name, version in packages.items()}
    return {name: one_line(text, 80) for name, text in found.items() if text}


def _digest(folder: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        if data := read_bytes(Path(folder), name):
            return hashlib.sha256(data).hexdigest()[:8]
    return ""


def _no_run(run: Any, place: int) -> str:
    hint = "Pass what launch() returned, or an id that runs() lists."
    if isinstance(run, (list, tuple)):
        hint = "Pass the runs one by one: compare(*runs)."
    elif callable(run):
        hint = "Pass the run, not the function: run = launch(function, 2)."
    kind = "type" if isinstance(run, type) else type(run).__name__
    return f"argument {place} of compare() is not a run: {one_line(repr(run), 80)} ({kind}). {hint}"


def _snapshot_of(results: Results, place: int) -> RunSnapshot:
    """Return a snapshot with as much of the run as its results hold."""
    failures = {failure.rank: failure for failure in results.failures}
    ranks = tuple(
        RankSnapshot(
            rank=summary.rank,
            state=summary.state,
            reason=failures[summary.rank].summary if summary.rank in failures else "",
            seconds=summary.seconds,
            peak_memory=summary.peak_memory,
            returned=results.short(summary.rank),
        )
        for summary in results.ranks
    )
    return RunSnapshot(
        id="",
        name=f"results {place}",
        state="failed" if failures else "stopped" if results.stopped_by else "done",
        started=0.0,
        seconds=results.seconds,
        num_processes=len(results),
        summary="",
        seed=results.seed,
        restarts=results.restarts,
        stopped_by=results.stopped_by,
        timed_out=results.timed_out,
        ranks=ranks,
        failures=tuple(
            RankFailure(rank=failure.rank, summary=failure.summary, victim=failure.victim)
            for failure in results.failures
        ),
    )
