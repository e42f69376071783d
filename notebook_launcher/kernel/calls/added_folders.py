"""New entries of the kernel's `sys.path` since ranks were started: later calls of a session import from them, too."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING

from notebook_launcher.ipython_shell import running_shell

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["AddedFolders", "absolute_folders"]


class AddedFolders:
    """Entries of `sys.path` that are newer than this object."""

    def __init__(self) -> None:
        self._begun = frozenset(_names(sys.path))
        self._seen = list(sys.path)
        self._first: tuple[str, ...] = ()
        self._last: tuple[str, ...] = ()

    def look(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the new entries before all others, and the other new ones, as absolute paths."""
        if sys.path != self._seen:
            self._seen = list(sys.path)
            entries = _names(self._seen)
            first = list(itertools.takewhile(lambda entry: entry not in self._begun, entries))
            last = [entry for entry in entries[len(first) :] if entry not in self._begun]
            self._first, self._last = tuple(absolute_folders(first)), tuple(absolute_folders(last))
        return self._first, self._last


def _names(path: Iterable[object]) -> list[str]:
    return [entry for entry in path if isinstance(entry, str)]  # Python ignores other objects, too.


def absolute_folders(entries: Iterable[str]) -> list[str]:
    """Return entries of `sys.path` as absolute paths.

    A relative entry that names nothing in the working directory belongs to a folder that was it before: the one in
    which the notebook has started, or one of those to which `%cd` has changed.
    """
    shell = running_shell()
    try:
        folders = [os.getcwd()]
    except OSError:  # It was removed, so that a relative entry names nothing.
        folders = [""]
    if shell is not None:
        folders += [getattr(shell, "starting_dir", ""), *map(str, shell.user_ns.get("_dh", ()))]
    found = []
    for entry in entries:
        places = [os.path.normpath(os.path.join(folder, entry)) for folder in folders]
        found.append(next(filter(os.path.exists, places), places[0]))
    return found
