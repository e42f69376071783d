"""Stages: folders that are written aside, then put in place, so that a target is whole at any moment.

A save is written to `.<name>.partial-<token>` beside its target. Once it is complete and on the disk, it gets its
place in one of two ways:

* By one rename or, if the target holds an earlier save and nothing else, by exchanging the two folders (Linux'
  renameat2). At every moment, both are whole.
* File by file, if the target holds files of the user, is where this process works, or lies on a file system of its
  own. First the folder is renamed to `.<name>.ready-<token>`; from then on the save counts. If the process is killed,
  the next one that calls `settle` moves the remaining files.

The next save of the same target removes what a killed save has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.training.checkpoints.folders.durable_files import sync_folder, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = ["contents", "discard", "open_stage", "publish", "replace_file", "settle"]

MOVES = ".moves.json"
AT_FDCWD = -100
RENAME_EXCHANGE = 2


def open_stage(target: Path) -> Path:
    """Return a new empty folder for the files of the next save, after removing what killed saves left.

    Args:
        target: The folder that is to hold them, a real path; it may exist.

    Raises:
        NotADirectoryError: `target` is a file.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; a checkpoint is a folder. Choose another name.")
    settle(target)
    for leftover in _siblings(target, "partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    return _make_stage(target)


def _make_stage(target: Path) -> Path:
    name = _sibling_name(target, "partial") + secrets.token_hex(4)
    # Files can be renamed within a file system only, and a mount point's parent is on another.
    if not target.exists() or target.stat().st_dev == target.parent.stat().st_dev:
        stage = target.parent / name
        try:
            stage.mkdir()
        except PermissionError:
            if not target.exists():
                raise
        else:
            return stage
    stage = target / name
    stage.mkdir()
    return stage


def publish(stage: Path, target: Path, *, last: str, stale: Collection[str], replaceable: bool) -> None:
    """Put a complete save in its place; afterwards it is on the disk.

    Args:
        stage: From `open_stage`, with all files synchronised.
        target: As for `open_stage`.
        last: The file that a reader looks for first, so that it comes last where files are moved one by one.
        stale: Files of the earlier save that this one does not replace.
        replaceable: True if the target, if it exists, holds nothing but an earlier save.
    """
    for folder in [stage, *(path for path in stage.rglob("*") if path.is_dir())]:
        sync_folder(folder)
    beside = stage.parent == target.parent
    if beside and not target.exists():
        stage.rename(target)
        sync_folder(target.parent)
    elif beside and replaceable and not _is_workplace(target) and _exchange(stage, target):
        sync_folder(target.parent)
        shutil.rmtree(stage)
    else:
        names = sorted(contents(stage) - {last})
        write_text(stage / MOVES, json.dumps({"files": [*names, last], "stale": sorted(stale)}))
        ready = stage.with_name(stage.name.replace(".partial-", ".ready-"))
        stage.rename(ready)
        sync_folder(ready.parent)
        _move_in(ready, target)


def settle(target: Path) -> None:
    """Finish the save that a killed process had completed but not moved to `target`."""
    for ready in _siblings(target, "ready"):
        _move_in(ready, target)


def discard(stage: Path) -> None:
    """Remove a save that did not become complete."""
    shutil.rmtree(stage, ignore_errors=True)


def contents(folder: Path) -> set[str]:
    """Return the relative paths of all files in a folder and its folders, without the files of saves under way."""
    found = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if not path.is_dir() and not _is_stage(name.parts[0]):
            found.add(name.as_posix())
    return found


def replace_file(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write(path)` write a file aside, then rename the file to `target`."""
    target = Path(os.path.realpath(target))
    for leftover in _siblings(target, "partial"):
        leftover.unlink(missing_ok=True)
    stage = target.with_name(_sibling_name(target, "partial") + secrets.token_hex(4))
    try:
        write(stage)
        stage.replace(target)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _sibling_name(target: Path, state: str) -> str:
    return f".{target.name}.{state}-"


def _siblings(target: Path, state: str) -> list[Path]:
    """Return the stages of a target, beside it and in it."""
    prefix = _sibling_name(target, state)
    found = []
    for folder in (target.parent, target):
        with contextlib.suppress(OSError):
            found += [path for path in folder.iterdir() if path.name.startswith(prefix)]
    return sorted(found)


def _is_stage(name: str) -> bool:
    return name.startswith(".") and (".partial-" in name or ".ready-" in name)


def _is_workplace(target: Path) -> bool:
    """Return True if this process works in the folder or below: after an exchange its folder would be removed."""
    try:
        return Path.cwd().is_relative_to(target)
    except FileNotFoundError:  # it was removed
        return False


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; return False if the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0)


def _move_in(ready: Path, target: Path) -> None:
    """Move the files of a complete save into their folder, continuing where another process was killed."""
    with _locked(ready):
        try:
            moves = json.loads((ready / MOVES).read_text())
        except FileNotFoundError:
            return  # another process was quicker
        *_, last = moves["files"]
        if len(moves["files"]) > 1 and (ready / last).exists():
            # Without the file that they look for first, readers fail, and do not mix old and new.
            (target / last).unlink(missing_ok=True)
        folders = {target}
        for name in moves["files"]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            folders.add((target / name).parent)
            with contextlib.suppress(FileNotFoundError):  # moved before
                (ready / name).replace(target / name)
        for folder in folders:
            sync_folder(folder)
        for name in moves["stale"]:
            (target / name).unlink(missing_ok=True)
        finished = ready.with_name(ready.name.replace(".ready-", ".partial-"))
        ready.rename(finished)
        shutil.rmtree(finished)
        sync_folder(target)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from moving the same save."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield
        return
    try:
        # File systems without locks are left to chance: two would have to load just after a crash.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
