"""Pickles that a host leaves in a run's folder for later clients of the same user."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_own_pickle"]


def read_own_pickle(path: Path) -> Any:
    """Return what a host has written.

    Raises:
        FileNotFoundError: There is no such file.
        PermissionError: The file belongs to another user, and a pickle can run any code.
        Exception: The file cannot be unpickled; another version of this package may have written it.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user, so it is not read: attach as that user.")
        return pickle.load(file)
