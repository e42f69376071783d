"""The user's own modules for nodes that lack the kernel's folder: their sources, in an archive that is imported from.

A node keeps the archive in memory, so nothing of it is left there, whatever ends the node's processes. Ranks import the
modules by name as on one machine, so values of their classes travel back as they are.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from pathlib import Path

from notebook_launcher.travel.changed_modules import is_local

__all__ = ["archive_modules", "path_of_archive"]


def archive_modules() -> bytes:
    """Return a zip archive of all modules that this process has imported and that are not installed; empty: none."""
    files: dict[str, Path] = {}
    for name, module in sorted(sys.modules.items()):
        if is_local(module) and name == module.__name__ and name.partition(".")[0] != "notebook_launcher":
            path = Path(str(module.__file__))
            inside = name.replace(".", "/")
            files[f"{inside}/__init__.py" if path.name == "__init__.py" else f"{inside}.py"] = path
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for inside, path in files.items():
            if path.is_file():
                file.write(path, inside)
    return archive.getvalue() if files else b""


def path_of_archive(fd: int) -> str:
    """Return an entry for `sys.path` by which children of this process import from an archive in a file of memory."""
    return f"/proc/{os.getpid()}/fd/{fd}"
