"""Test of a node for the kernel's folder: the kernel puts a mark into it for a moment, and the node looks for that.

A path that exists on both sides proves little: every machine has a home folder of that name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["mark"]


@contextlib.contextmanager
def mark(folder: Path) -> Iterator[str | None]:
    """Yield the path of an empty file in a folder, which is gone afterwards; None if none can be made there."""
    path = folder / f".notebook-launcher-{secrets.token_hex(8)}"
    try:
        path.touch(exist_ok=False)
    except OSError:
        yield None
        return
    try:
        yield os.fspath(path)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
