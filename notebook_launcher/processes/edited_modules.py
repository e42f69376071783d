"""The user's modules in the ranks of a session: after a file was edited, its module is imported again."""

from __future__ import annotations

import importlib
import os
import site
import sys
from pathlib import Path
from typing import Any

__all__ = ["LocalModules"]


class LocalModules:
    """The modules under the notebook's folder, with the state of their files at the end of the last call."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._inside = os.path.join(folder, "")
        ours = str(Path(__file__).parents[1])
        installed = {*site.getsitepackages(), sys.prefix, sys.base_prefix, ours}
        self._installed = tuple(os.path.join(folder, "") for folder in installed)
        # Modules that were there before the first call are the launcher's own, or were inherited from the kernel.
        self._known = set(sys.modules)
        self._seen: dict[str, tuple[int, int]] = {}
        self._remembered: tuple[int, str] | None = None
        """Number of modules and the newest one when `remember` last looked at all of them; None: it is to look."""

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
        return [os.path.relpath(file, self._folder) for file in edited]

    def remember(self) -> None:
        """Record the state of the files of newly imported modules.

        Call it before the end of the call is reported, because the user may edit a file as soon as the cell returns.
        """
        # Python adds a new module at the end. To compare all 2,000 names took a third of a short call in a rank.
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
        # Not getattr: some of torch's modules import others when asked for an attribute.
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or not file.endswith(".py"):
            return None
        return file if file.startswith(self._inside) and not file.startswith(self._installed) else None


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
