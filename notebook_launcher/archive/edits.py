"""Edits of a run by the user: its name, tags and notes, in a file of its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.config import LaunchConfig
from notebook_launcher.history import encoding, run_files, run_folders
from notebook_launcher.history.folder_files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["check_edits", "read_edits", "write_edits"]


def check_edits(name: str | None, tags: Iterable[str] | None, notes: str | None) -> dict[str, Any]:
    """Return the edits that are given, checked; None leaves a part as it is.

    Raises:
        ConfigError: The name or a tag is not text.
    """
    words = (tags,) if isinstance(tags, str) else tuple(tags or ())
    checked = LaunchConfig(name=name, tags=words)
    given = {"name": name, "tags": None if tags is None else list(checked.tags), "notes": notes}
    return {key: value for key, value in given.items() if value is not None}


def read_edits(folder: Path) -> dict[str, Any]:
    """Return the edits in a run's folder."""
    return read_json(folder, run_folders.EDITS) or {}


def write_edits(folder: Path, edits: Mapping[str, Any]) -> None:
    """Add edits to those in a run's folder; raises `OSError`."""
    path, data = folder / run_folders.EDITS, encoding.encode({**read_edits(folder), **edits})
    run_files.replace(path, data.encode("ascii"), path.with_suffix(".json.part"))
