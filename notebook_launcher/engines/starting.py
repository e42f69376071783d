"""The three ways to start a supervisor; everything after the start is the same.

* `forkserver` (`fork_server_handle.py`): forked from a clean helper that has imported torch. Works whatever the kernel
  did.
* `fork`: forked from the kernel. Captured data is shared and nothing is pickled.
* `spawn`: a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from typing import TYPE_CHECKING

from notebook_launcher.engines.fork_server_handle import fork_server_of
from notebook_launcher.engines.supervisor_handle import (
    LAST_WORDS,
    REAPING,
    SupervisorHandle,
    popen,
    reaper,
    send_signal,
)
from notebook_launcher.messaging.channel import anonymous_file, read_tail
from notebook_launcher.processes.child_processes import wait_for_end
from notebook_launcher.processes.rank import forking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.engines.supervisor_handle import Starter
    from notebook_launcher.travel import FunctionCall

__all__ = ["fork_starter", "start_by_spawn"]

_FORKING = threading.Lock()
"""Held during a fork: the child gets a copy of the locks that other threads hold, and of the warnings' filters."""


def start_by_spawn(sock: socket.socket, kernel_fds: Sequence[int]) -> SupervisorHandle:
    """Start a supervisor in a fresh interpreter."""
    del kernel_fds  # A fresh interpreter does not inherit the kernel's descriptors.
    errors = anonymous_file("errors")
    process = popen("supervisor", sock.fileno(), errors, dict(os.environ))

    def wait() -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAPING)

    return SupervisorHandle(reaper(wait, [errors]), lambda: read_tail(errors, LAST_WORDS), process.send_signal)


def fork_starter(call: FunctionCall) -> Starter:
    """Return a starter that forks the supervisor from this process, so that the ranks inherit `call`."""

    def starter(sock: socket.socket, kernel_fds: Sequence[int]) -> SupervisorHandle:
        errors = anonymous_file("errors")
        if "torch" in sys.modules:
            _import_for_children()
        with _FORKING, warnings.catch_warnings():
            # Python 3.12 warns that a fork of a process with threads may deadlock. The user asked for the fork, and
            # `kernel/calls/fork_check.py` has tested for the known causes.
            warnings.simplefilter("ignore", DeprecationWarning)
            forking.settle_before_a_fork()
            pid = os.fork()
        if pid == 0:
            _become_supervisor(sock, call, errors, kernel_fds)

        return SupervisorHandle(
            reaper(lambda: wait_for_end(pid, REAPING), [errors]),
            lambda: read_tail(errors, LAST_WORDS),
            lambda signum: send_signal(pid, signum),
        )

    return starter


def _import_for_children() -> None:
    """Import in the kernel, once, the modules that each child would import at every launch, which takes 40 ms."""
    importlib.import_module("notebook_launcher.processes.supervisor")
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # Ranks seed it; NumPy 2 imports it only at first use.


def _become_supervisor(sock: socket.socket, call: FunctionCall, errors: int, kernel_fds: Sequence[int]) -> None:
    try:
        for fd in (*kernel_fds, *fork_server_of(os.getppid()).descriptors()):
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        # Imported here, because these modules import torch, which only the child may do.
        from notebook_launcher.processes.rank import group_functions
        from notebook_launcher.processes.supervisor import run_supervisor

        group_functions.replace_group_functions()
        group_functions.redirect_globals(call.fn)
        run_supervisor(socket.socket(fileno=sock.detach()), call)
    except BaseException:  # the process ends here; the kernel reads its last words
        os.write(errors, traceback.format_exc().encode())
    finally:
        os._exit(0)
