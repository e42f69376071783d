"""`open_run(...)` opens a run that has left a folder, by its id, the beginning of its id, or `"last"`."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from notebook_launcher.archive.listing import require_home, stored_runs
from notebook_launcher.archive.recorded import RecordedRun
from notebook_launcher.errors import ConfigError
from notebook_launcher.history import run_folders
from notebook_launcher.tracebacks import for_caller
from notebook_launcher.wording import did_you_mean, first_few, type_of

LAST = "last"
"""The word for the latest run."""


def open_run(run: str | os.PathLike[str], folder: str | os.PathLike[str] = "auto") -> RecordedRun:
    """Return a run that has left a folder.

    Args:
        run: The run's id, the beginning of its id, the path of its folder, or `"last"` for the latest run.
        folder: The folder that holds the runs' folders. `"auto"`: see `LaunchConfig.runs_folder`.

    Raises:
        LookupError: There is no such run, the beginning fits several runs, or `folder` is `"auto"` and recording of
            runs is off.
        ConfigError: `run` or `folder` is neither text nor a path.
    """
    if not isinstance(run, str | os.PathLike):
        msg = f"run={run!r} is {type_of(run)}. Pass a run's id, as runs() shows it, or the path of its folder."
        raise ConfigError(msg)
    if isinstance(run, os.PathLike) or os.sep in run:
        return RecordedRun(Path(run).expanduser().absolute())
    home = require_home(folder)
    ids = run_folders.list_ids(home)
    found = [name for name in ids if name == run] or [name for name in ids if run and name.startswith(run)]
    if not found and run == LAST and (every := stored_runs(home)):
        return every[0]
    if len(found) == 1:
        return RecordedRun(home / found[0])
    # Of runs of one second the ids do not show which is the latest.
    in_order = ids if found else [stored.id for stored in stored_runs(home)]
    raise for_caller(LookupError(_why_not_one(run, home, in_order, found)))


def _why_not_one(run: str, home: Path, ids: list[str], found: list[str]) -> str:
    if found:
        return f"{len(found)} runs in {home} begin with {run!r}: {first_few(found)}. Type more of the id."
    if not ids:
        return (
            f"there is no run {run!r}: no run has left a folder in {home}. A launch of more than a second leaves one, "
            "and runs(folder) lists another folder."
        )
    hint = did_you_mean(run, ids) or _near_name(run, ids) or f"The latest is {ids[0]}."
    lists = f"runs(), in a terminal `notebook-launcher runs`, lists all {len(ids)}."
    return f"there is no run {run!r} in {home}. {hint} {lists}"


def _near_name(run: str, ids: list[str]) -> str:
    """Return the latest run of each function whose name is close to the text, as a question; empty if none is."""
    latest: dict[str, str] = {}
    for run_id in ids:
        latest.setdefault(run_folders.name_in(run_id), run_id)
    close = difflib.get_close_matches(run, latest)
    return f"Did you mean {' or '.join(latest[name] for name in close)}?" if close else ""
