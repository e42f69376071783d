"""Files that are read within bounds and replaced as a whole."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def check_plain(path: Path) -> None:
    """Raise `OSError` unless a file is an ordinary one: a named pipe, which an archive can hold, never ends."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))


def read_text(path: Path, most: int) -> str:
    """Return the text of an ordinary file of at most so many bytes; raises `OSError` and `UnicodeDecodeError`."""
    check_plain(path)
    if path.stat().st_size > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return path.read_text(encoding="utf-8")


def replace_file(
    target: Path, write: Callable[[Path], object], *, mode: int = 0o666, in_own_folder: bool = False
) -> None:
    """Let `write(path)` write a file aside, then rename it to `target`, which stays as it is if that fails.

    Args:
        target: The file.
        write: Writes the path that it gets.
        mode: Permissions of the new file.
        in_own_folder: True: what a killed process has left beside the target is removed, and a target that is a link
            stays one. False: others may write there, whose files are not removed and whose links are not followed.
    """
    if in_own_folder:
        target = Path(os.path.realpath(target))
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
            leftover.unlink(missing_ok=True)
    # Of a name that nobody can take before: in a folder that others write, it could be a link.
    part = target.with_name(f".{target.name}.partial-{secrets.token_hex(8)}")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
        write(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
