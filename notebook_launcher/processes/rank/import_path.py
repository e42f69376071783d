"""The import path of a session's rank, which follows what the kernel adds to its own."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_folders"]


def add_folders(first: Sequence[str], last: Sequence[str]) -> None:
    """Put folders at the beginning and at the end of `sys.path`, except those that it has; what it has stays."""
    new_first = [folder for folder in first if folder not in sys.path]
    new_last = [folder for folder in last if folder not in sys.path]
    if new_first or new_last:
        sys.path[:] = [*new_first, *sys.path, *new_last]
        importlib.invalidate_caches()  # A folder may not have been there when Python last looked.
