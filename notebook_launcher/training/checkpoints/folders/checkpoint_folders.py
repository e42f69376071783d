"""The folder of a checkpoint: the one to save to, the one to load from, and the ones that go to make room."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.training.checkpoints.checkpoint_error import CheckpointError
from notebook_launcher.training.checkpoints.folders.staging import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.plugins import ProjectConfiguration

__all__ = ["continue_after", "folder_to_load", "folder_to_save", "keep_newest", "newest_of"]

NUMBERED = re.compile(r"checkpoint_(\d+)")


def folder_to_save(config: ProjectConfiguration, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder for the next checkpoint.

    Raises:
        ValueError: None was given and naming is not automatic, or the automatic name is taken.
    """
    if output_dir is not None:
        return _real(output_dir)
    directory = _checkpoints(config, "save_state")
    target = directory / f"checkpoint_{config.iteration}"
    if target.exists():
        newest = _numbered(directory)[-1][0]
        raise ValueError(
            f"{target} exists already, and automatic naming never overwrites a checkpoint. To continue after the "
            f"newest: ProjectConfiguration(..., iteration={newest + 1}), or call load_state() first."
        )
    return target


def folder_to_load(config: ProjectConfiguration, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the checkpoint to load, after moving a complete save of a killed process to its place.

    Raises:
        ValueError: None was given and naming is not automatic.
        CheckpointError: No checkpoint was found.
    """
    if input_dir is not None:
        folder = _real(input_dir)
        settle(folder)
        if not folder.is_dir():
            raise CheckpointError(f"load_state({os.fspath(input_dir)!r}): there is no folder {folder}. Check the path.")
        return folder
    directory = _checkpoints(config, "load_state")
    found = _numbered(directory)
    if not found:
        raise CheckpointError(f"load_state(): {directory} holds no folder checkpoint_N yet. Call save_state() first.")
    return found[-1][1]


def newest_of(saved: Sequence[str]) -> Path | None:
    """Return the last of a run's checkpoints that still exists, which is the newest; None without any."""
    for folder in map(Path, reversed(saved)):
        settle(folder)
        if folder.is_dir():
            return folder
    return None


def continue_after(config: ProjectConfiguration, folder: Path) -> None:
    """Let automatic naming continue after the checkpoint that was loaded, if it named that checkpoint."""
    if _is_numbered(config, folder):
        config.iteration = max(config.iteration, int(folder.name.rpartition("_")[2]) + 1)


def keep_newest(config: ProjectConfiguration, newest: Path) -> None:
    """Remove the oldest automatically named checkpoints, now that a new one is whole.

    Numbers count up, so a checkpoint with a higher number than the new one is of an earlier run, and older than all of
    this run: a run that loads nothing begins at 0 again.
    """
    if config.total_limit is None or not _is_numbered(config, newest):
        return
    directory = newest.parent
    for leftover in directory.glob(".checkpoint_*.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    others = [(number, folder) for number, folder in _numbered(directory) if folder != newest]
    mine = int(newest.name.rpartition("_")[2])
    oldest_first = sorted(others, key=lambda other: (other[0] < mine, other[0]))
    for _, folder in oldest_first[: max(0, len(others) + 1 - config.total_limit)]:
        # Renamed first, so that no half removed checkpoint looks whole.
        doomed = directory / f".{folder.name}.partial-{secrets.token_hex(4)}"
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _is_numbered(config: ProjectConfiguration, folder: Path) -> bool:
    """Return True if automatic naming made the folder's name."""
    if not config.automatic_checkpoint_naming or config.project_dir is None:
        return False
    home = _real(Path(config.project_dir) / "checkpoints")
    return folder.parent == home and NUMBERED.fullmatch(folder.name) is not None


def _checkpoints(config: ProjectConfiguration, function: str) -> Path:
    if not config.automatic_checkpoint_naming:
        raise ValueError(
            f"{function}() needs a folder: pass one, or have folders named automatically: ProjectConfiguration("
            "project_dir=..., automatic_checkpoint_naming=True)."
            + (
                ' A launch with resume="checkpoint" needs none: after a failure it loads the newest that it has saved.'
                if function == "load_state"
                else ""
            )
        )
    if config.project_dir is None:
        raise ValueError(f"{function}() without a folder needs a project: pass Accelerator(project_dir=...).")
    return _real(Path(config.project_dir) / "checkpoints")


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints by number, the oldest first."""
    if not directory.is_dir():
        return []
    matches = ((NUMBERED.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def _real(folder: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(Path(folder).expanduser()))
