"""The folder of this package, and the frames whose code is in it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PACKAGE_FOLDER", "is_ours"]

# Not resolved: where a link leads to the package, the names of its files in frames go over the link, too.
PACKAGE_FOLDER = Path(__file__).parent
_PREFIX = f"{PACKAGE_FOLDER}/"


def is_ours(filename: str) -> bool:
    """Return True for a file of this package."""
    return filename.startswith(_PREFIX)
