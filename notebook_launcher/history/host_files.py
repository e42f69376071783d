"""Files of a host in the folder of its run or session, by which others see that there is a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ENDING", "OUTPUT", "SESSION_SOCKET", "SOCKET", "goes_on", "is_hosted", "is_session"]

SOCKET = "host.sock"
SESSION_SOCKET = "session.sock"
"""Name of the socket in a session's folder."""
ENDING = "ending.pickle"
"""Name of the file with the end of a hosted run, in the same folder."""
OUTPUT = "output.pickle"
"""Name of the file with the output of a hosted run that is over, as its cell showed it."""


def is_hosted(folder: Path) -> bool:
    """Return True if the run in a folder was launched with `detached=True`."""
    # A host that was killed leaves its socket.
    return any((folder / name).exists() for name in (SOCKET, ENDING))


def goes_on(folder: Path) -> bool:
    """Return True if a hosted run has not ended; its host keeps the folder for a while after the end."""
    return (folder / SOCKET).exists() and not (folder / ENDING).exists()


def is_session(folder: Path) -> bool:
    """Return True if the folder belongs to a session with `detached=True`, which is open, or whose host was killed."""
    return (folder / SESSION_SOCKET).exists()
