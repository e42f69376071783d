"""The kernel's handle on a supervisor, and the protocol of the functions that start one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from typing import TYPE_CHECKING, Any

from notebook_launcher.processes import boot

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Starter: TypeAlias = Callable[[socket.socket, Sequence[int]], "SupervisorHandle"]
    """Starts a supervisor at the other end of a socket. A forked child has to close these descriptors of the kernel."""

__all__ = ["LAST_WORDS", "REAPING", "SupervisorHandle", "popen", "reaper", "send_signal"]

LAST_WORDS = 4000
"""Bytes at the end of a supervisor's standard error that are shown if it fails."""
REAPING = 2.0
"""Longest wait in seconds until a supervisor that has ended is reaped, which takes a millisecond."""


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisorHandle:
    """The kernel's handle on a supervisor that was started."""

    wait_reaped: Callable[[], None]
    """Waits until the process is reaped, at most REAPING seconds, and closes the handle's descriptors; idempotent."""
    last_words: Callable[[], str]
    """Returns the end of its standard error."""
    send_signal: Callable[[int], None]
    """Sends the process, which has not ended, a signal, even if it has not come up yet: SIGCONT, in case it is stopped,
    or SIGKILL."""


def reaper(wait: Callable[[], object], fds: list[int]) -> Callable[[], None]:
    """Return a function that waits for a process by `wait`, and closes descriptors; idempotent."""

    def wait_reaped() -> None:
        # An interrupt may end this call anywhere; the caller then calls it again.
        if fds:
            wait()
        while fds:
            os.close(fds.pop())

    return wait_reaped


def send_signal(pid: int, signum: int) -> None:
    """Send a process a signal, if it is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def popen(role: Any, fd: int, errors: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start an interpreter in this role, with one end of a socket and a file for its output."""
    # In a session of its own, because the kernel's interrupt goes to the kernel's whole process group.
    return subprocess.Popen(
        boot.command(role, fd),
        pass_fds=[fd],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        start_new_session=True,
    )
