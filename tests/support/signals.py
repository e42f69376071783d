"""Signals to processes, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading


def keep_stopped(pid: int, over: threading.Event) -> None:
    """Stop a process as often as it is continued."""
    with contextlib.suppress(ProcessLookupError):
        while not over.wait(0.0):
            os.kill(pid, signal.SIGSTOP)
