"""Warnings that name the line of the user's code that led to them."""

from __future__ import annotations

import sys
import warnings

from notebook_launcher.context import current, notify
from notebook_launcher.tracebacks import is_ours


def warn_user(message: str) -> None:
    """Warn at the first line outside this package."""
    warnings.warn(message, stacklevel=_outside())


def notify_or_warn(text: str) -> None:
    """Show a line in the cell; without a launcher, warn."""
    if current() is None:
        warn_user(text)
    else:
        notify(text)


def users_name(*values: object) -> str:
    """Return the name of the user's variable, of the innermost code outside this package, that is one of these."""
    frame = sys._getframe(_outside() - 1)  # noqa: SLF001
    while frame is not None:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            if any(value is each for each in values):
                return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Warner:
    """Warns once for each key."""

    def has_warned(self, key: str) -> bool:
        """Return True if it was called with this key."""
        return key in self._warned

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
