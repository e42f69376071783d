"""The process around a rank: its signals, its standard streams, and its exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from notebook_launcher.processes import inherited
from notebook_launcher.processes.libraries import signal_at_parents_death

if TYPE_CHECKING:
    from notebook_launcher.processes.rank.rank_start import RankStart

__all__ = [
    "begin",
    "flush",
    "leave",
    "mend_output",
    "open_streams",
    "redirect_output",
]

FIRST_OWN_FD = 3


def begin() -> None:
    """Lead a session, die with the parent, and handle signals in the default way."""
    os.setsid()
    _die_with_parent()
    _reset_signals()


def _die_with_parent() -> None:
    """Have Linux kill this process when its parent dies."""
    parent = os.getppid()
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _reset_signals() -> None:
    """Give signals their default meaning."""
    # A fork of the kernel inherits its handlers, its blocked signals and asyncio's wake-up pipe.
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)


def redirect_output(start: RankStart) -> None:
    """Make the rank's pipes its standard output and error, and its standard input empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (start.stdout_fd, 1), (start.stderr_fd, 2)):
        os.dup2(source, target, inheritable=True)
        os.close(source)
    if start.setup.start_method != "forkserver":  # Its forks have inherited such streams.
        open_streams()


def open_streams() -> None:
    """Replace the standard streams by ones that write whole lines, and point logging handlers at the new ones.

    The fork server does this once for all ranks: in each rank, it would copy 380 pages of the server's memory.
    """
    old = sys.stdout, sys.stderr
    # Line buffering, so that the last lines before a crash reach the pipe.
    form: dict[str, Any] = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    streams = [open(fd, "w", **form) for fd in (1, 2)]  # noqa: SIM115 - they stay open for the rank's life
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    inherited.move_log_handlers(dict(zip(map(id, old), streams, strict=True)))


def flush() -> None:
    """Flush the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def mend_output() -> None:
    """Flush the standard streams, and open /dev/null in place of a standard descriptor that user code closed.

    Otherwise the next file that is opened would get the descriptor's number, and `print` would write into that file.
    """
    flush()
    with contextlib.suppress(OSError):  # If no descriptor is free, no standard one is closed.
        while (null := os.open(os.devnull, os.O_RDWR)) < FIRST_OWN_FD:  # `open` returns the lowest free number.
            os.set_inheritable(null, True)
        os.close(null)


def leave() -> int:
    """Exit as the interpreter does: wait for threads, then run exit handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    inherited.finish_multiprocessing()
    flush()
    return 0
