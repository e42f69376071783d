"""The user's modules in the ranks of a session: after a file was edited, its module is imported again."""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

from notebook_launcher.travel.changed_modules import is_local

__all__ = ["LocalModules"]


class LocalModules:
    """The modules that no package installs, with the state of their files at the end of the last call.

    Args:
        folder: The notebook's folder, from which the edited files are named.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # Modules that were there before the first call are the launcher's own, or were inherited from the kernel.
        self._known = set(sys.modules)
        self._seen: dict[str, tuple[int, int]] = {}
        self._remembered: tuple[int, str] | None = None
        """Number of modules, and the newest one, when `remember` last looked at all; None: it must look again."""

    def forget_edited(self) -> list[str]:
        """Forget all local modules if one was edited, so that they are imported again; return the edited files.

        All of them, because a module that was not edited may hold names of an edited one.
        """
        edited = [file for file, stamp in self._seen.items() if _stamp(file) != stamp]
        if edited:
            for name in self._names():
                del sys.modules[name]
                self._known.discard(name)
            importlib.invalidate_caches()
            self._seen.clear()
            self._remembered = None  # The same modules may be imported again, in the same order.
        inside = os.path.join(self._folder, "")
        return [file.removeprefix(inside) for file in edited]

    def remember(self) -> None:
        """Record the state of the files of newly imported modules.

        Call it before the end of the call is reported, because the user may edit a file as soon as the cell returns.
        """
        # Python adds a new module at the end. Comparing all 2,000 names took a third of a short call in a rank.
        present = len(sys.modules), next(reversed(sys.modules))
        if present == self._remembered:
            return
        self._remembered = present
        for name in sys.modules.keys() - self._known:
            self._known.add(name)
            file = self._local_file(sys.modules[name])
            if file is not None and (stamp := _stamp(file)) is not None:
                self._seen[file] = stamp

    def _names(self) -> list[str]:
        return [name for name in self._known if self._local_file(sys.modules.get(name)) in self._seen]

    def _local_file(self, module: Any) -> str | None:
        return str(module.__file__) if isinstance(module, types.ModuleType) and is_local(module) else None


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
