"""The fork server: a clean process, one per kernel, from which supervisors are forked.

It has imported torch and runs nothing of the user's, so a process forked from it carries no OpenMP
pool, no CUDA context and no thread, whatever the kernel did before. It exits when the kernel does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
from typing import TYPE_CHECKING

from notebook_launcher import messages
from notebook_launcher.channel import Channel
from notebook_launcher.processes import frontend, pages, rendezvous
from notebook_launcher.processes.supervisor import run_supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

# What is done once the server has been idle for a while. A launch that meets one waits for it, up to 1.4 s.
# Nearly every training function needs these modules, and torch imports its compiler at the first
# optimizer, which every rank would pay for.
CHORES: tuple[Callable[[], object], ...] = (
    pages.collapse,
    lambda: importlib.import_module("torch._dynamo"),
    lambda: importlib.import_module("torch.utils.data"),
    lambda: importlib.import_module("notebook_launcher.training.accelerator"),
    pages.collapse,
)
IDLE = 0.2
"""Seconds. While the first ranks run, that is: nine launches that each make an optimizer, one right after another,
took 13 s with 2 s, since every rank imported torch's compiler for itself, and take 3 s."""


def main(fd: int) -> None:
    """Serve the kernel at the other end of descriptor `fd` until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel_pid = os.getppid()
    os.chdir("/")  # The kernel's folder may go; torch's modules cannot be imported where there is none.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's import starts a pool of threads otherwise.
    _import_now()
    become = _Server(Channel(socket.socket(fileno=fd)), kernel_pid).serve()
    if become is not None:
        become()


def _import_now() -> None:
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

    rendezvous.install()
    frontend.warm()


class _Server:
    def __init__(self, channel: Channel, kernel_pid: int) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._on_message)
        self._reaped_pipes: dict[int, int] = {}
        self._chores = list(CHORES)
        self._kernel_pidfd = -1
        # The channel's end of file would do, but a process that the user's code forked from the kernel
        # may hold a copy of the kernel's end.
        with contextlib.suppress(OSError, AttributeError):
            self._kernel_pidfd = os.pidfd_open(kernel_pid)
            self._selector.register(self._kernel_pidfd, selectors.EVENT_READ, lambda: False)

    def serve(self) -> Callable[[], None] | None:
        """Serve until the kernel is gone; in a process that was forked, return what it is to become.

        By returning, a child sheds the server's frames, which would stand in its every traceback.
        """
        pause = IDLE
        while True:
            self._freeze()
            events = self._selector.select(pause if self._chores else None)
            pause = IDLE if events else 0
            if not events:
                with contextlib.suppress(Exception):  # A rank does by itself what could not be done here.
                    self._chores.pop(0)()
            for key, _ in events:
                go_on = key.data()
                if go_on is not True:
                    return go_on or None

    def _freeze(self) -> None:
        # Objects that are never collected are never written to, so their pages stay shared.
        gc.collect()
        gc.freeze()

    def _on_message(self) -> bool | Callable[[], None]:
        received = self._channel.receive()
        if received is None:
            return False
        match received:
            case messages.StartSupervisor(), (sock_fd, reaped_fd):
                return self._start_supervisor(sock_fd, reaped_fd)
            case unknown, _:
                msg = f"the fork server got an unknown message: {unknown!r}"
                raise TypeError(msg)

    def _start_supervisor(self, sock_fd: int, reaped_fd: int) -> bool | Callable[[], None]:
        try:
            pid = os.fork()
        except OSError:
            # The kernel learns of it by the end of file on the supervisor's channel.
            os.close(sock_fd)
            os.close(reaped_fd)
            return True
        if pid == 0:
            return self._become_supervisor(sock_fd, reaped_fd)
        os.close(sock_fd)
        pidfd = os.pidfd_open(pid)
        self._reaped_pipes[pidfd] = reaped_fd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pid, pidfd))
        return True

    def _become_supervisor(self, sock_fd: int, reaped_fd: int) -> Callable[[], None]:
        self._channel.close()
        self._selector.close()
        for fds in self._reaped_pipes.items():
            for fd in fds:
                os.close(fd)
        os.close(reaped_fd)
        with contextlib.suppress(OSError):
            os.close(self._kernel_pidfd)
        return lambda: run_supervisor(socket.socket(fileno=sock_fd))

    def _reap(self, pid: int, pidfd: int) -> bool:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(self._reaped_pipes.pop(pidfd))
        return True
