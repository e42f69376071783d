"""Warnings that name the line of the user's code that led to them."""

from __future__ import annotations

import sys
import warnings

from notebook_launcher.package_folder import is_ours

__all__ = ["Warner", "warn_user"]


def warn_user(message: str) -> None:
    """Warn at the first line outside this package."""
    warnings.warn(message, stacklevel=_outside())


class Warner:
    """Warns once for each key."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, key: str, message: str) -> None:
        """Warn, the first time that it is called with this key."""
        if key not in self._warned:
            self._warned.add(key)
            warn_user(message)


def _outside() -> int:
    # `skip_file_prefixes` of warnings.warn does this, from Python 3.12 on.
    frame, level = sys._getframe(1), 1  # noqa: SLF001
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level
