"""The runs in a folder, the newest first, and the folder itself."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING

from notebook_launcher.archive.recorded import RecordedRun
from notebook_launcher.errors import ConfigError
from notebook_launcher.history import run_folders
from notebook_launcher.history.folder_files import belongs_to_another, read_json
from notebook_launcher.tracebacks import for_caller
from notebook_launcher.wording.text import type_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["require_home", "stored_runs"]


def require_home(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that holds the runs.

    Raises:
        ConfigError: `folder` is neither text nor a path.
        LookupError: `folder` is `"auto"` and recording is off.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(
            f"folder={folder!r} is {type_of(folder)}. Pass the path of a folder that holds runs, or 'auto'."
        )
    home = run_folders.find_home(folder)
    if home is None:
        msg = f"runs are not recorded: {run_folders.VARIABLE} is 'off'. Pass the folder that holds the runs."
        raise for_caller(LookupError(msg))
    return home


def stored_runs(home: Path) -> list[RecordedRun]:
    """Return the runs in a folder, the newest first, without folders of other users and links."""
    items = []
    # A name holds the second of the launch; runs of one second are sorted by their summaries.
    for _, names in itertools.groupby(run_folders.list_ids(home), key=lambda name: name[: len("20261121-142501")]):
        same = list(_still_there(home, names))
        items += same if len(same) < 2 else sorted(same, key=_launched, reverse=True)
    return items


def _still_there(home: Path, names: Iterable[str]) -> Iterator[RecordedRun]:
    for name in names:
        # Another kernel may be making room.
        with contextlib.suppress(LookupError):
            if not belongs_to_another(home / name):
                yield RecordedRun(home / name)


def _launched(run: RecordedRun) -> float:
    """Return the time of a run's launch, of which alone the summary is read."""
    started = (read_json(run.folder, run_folders.SUMMARY) or {}).get("started")
    return started if isinstance(started, float) else run.listed().started
