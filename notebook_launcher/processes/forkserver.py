"""The fork server: a clean process, one per kernel, from which supervisors are forked.

It has imported torch and runs nothing of the user's, so a process forked from it carries no OpenMP
pool, no CUDA context and no thread, whatever the kernel did before. It exits when the kernel does.

Once it has been idle for a moment it does its chores, which take seconds. No launch waits for them: the
server forks a deputy first, which serves launches in its place until the chores are done.

    server ──fork──▶ imports, huge pages ──────────────▶ serves again
       └──▶ deputy   serves                        closes its channel; ends with its last supervisor
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import mmap
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING

from notebook_launcher import messages
from notebook_launcher.channel import Channel
from notebook_launcher.processes import frontend, pages, rendezvous
from notebook_launcher.processes.supervisor import run_supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["main"]

PREPARED = ("torch._dynamo", "torch.utils.data", "notebook_launcher.training.accelerator")
"""Modules that nearly every training function needs. torch imports its compiler at the first optimizer, which every
rank would pay for."""
IDLE = 0.2
"""Seconds without a launch before the chores begin. They begin while the first ranks run: nine launches that each make
an optimizer, one right after another, took 13 s with 2 s, since every rank imported torch's compiler for itself, and
take 3 s."""

COURTESY = 0.1
"""Seconds that the chores stand still after a launch has begun: two ranks and an import on two cores take 90 to 103 ms
to start, without the import 60."""
MOST_COURTESY = 5.0
"""Seconds that the chores stand still in all: somebody who launches without end shall have them done too."""


def main(fd: int) -> None:
    """Serve the kernel at the other end of descriptor `fd` until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel_pid = os.getppid()
    os.chdir("/")  # The kernel's folder may go; torch's modules cannot be imported where there is none.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's import starts a pool of threads otherwise.
    with _garbage_left():
        _import_now()
    become = _Server(Channel(socket.socket(fileno=fd)), kernel_pid).serve()
    become()
    os._exit(0)  # The exit handlers of torch take 45 ms, and there is nothing to save.


def _import_now() -> None:
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

    rendezvous.install()
    frontend.warm()


def _do_chores(launches: LaunchClock) -> None:
    """Do once what makes launches faster and takes too long to be waited for."""
    with _garbage_left(), _making_way(launches):
        for name in PREPARED:
            with contextlib.suppress(Exception):  # A rank imports by itself what could not be imported here.
                importlib.import_module(name)
    pages.collapse()


class LaunchClock:
    """Time of the newest launch, on a page that the server shares with its deputy."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def note(self) -> None:
        """Set the time to now."""
        struct.pack_into("d", self._page, 0, time.monotonic())

    def seconds_since(self) -> float:
        """Return the seconds since the newest launch, a large number if there was none."""
        (newest,) = struct.unpack_from("d", self._page)
        return float(time.monotonic() - newest)


class _CourteousFinder:
    """A finder that finds nothing: before each import it waits until the newest launch has had its time."""

    def __init__(self, launches: LaunchClock) -> None:
        self._launches = launches
        self._left = MOST_COURTESY

    def find_spec(self, *_: object) -> None:
        """Wait for at most `COURTESY` seconds after a launch."""
        wait = min(COURTESY - self._launches.seconds_since(), self._left)
        if wait > 0:
            self._left -= wait
            time.sleep(wait)


@contextlib.contextmanager
def _making_way(launches: LaunchClock) -> Iterator[None]:
    """Let imports inside this block stand still while a launch starts: they would take its ranks a core away."""
    finder = _CourteousFinder(launches)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _garbage_left() -> Iterator[None]:
    """Collect no garbage during imports: looking for it would take half of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Server:
    """Forks supervisors on request and reaps them: the fork server, or the deputy in its place."""

    def __init__(self, channel: Channel, kernel_pid: int) -> None:
        self._channel = channel
        self._fds: list[int] = []
        """Descriptors of this process alone, beside the channel."""
        self._children: dict[int, list[int]] = {}
        """By the number of each child: its pidfd, and what else is closed once it has been reaped."""
        self._has_chores = True
        self._launches = LaunchClock()
        self._is_retired = False
        """True in a deputy that takes no more launches."""
        self._is_done = False
        """True once the kernel is gone, and in a forked child."""
        self._become: Callable[[], None] = _nothing
        """In a forked child: its life as a supervisor."""
        # The channel's end of file would do, but a process that the user's code forked from the kernel
        # may hold a copy of the kernel's end.
        with contextlib.suppress(OSError, AttributeError):
            self._fds.append(os.pidfd_open(kernel_pid))
        self._server = -1
        """In a deputy: the pidfd of its server."""
        self._listen()

    def _listen(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_message)
        for kernel in self._fds:
            self._selector.register(kernel, selectors.EVENT_READ, self._on_kernel_gone)

    def serve(self) -> Callable[[], None]:
        """Serve until the kernel is gone, and return a function that does nothing.

        In a forked child, return the function that makes it a supervisor: by returning, the child sheds the server's
        frames, which would otherwise appear in its every traceback.
        """
        while self._is_needed:
            _freeze()
            events = self._selector.select(IDLE if self._has_chores else None)
            if not events:
                self._do_chores()
            for key, _ in events[:1]:  # What it does may close the descriptor of the next event.
                key.data()
        return self._become

    def _on_message(self) -> None:
        try:
            received = self._channel.receive(wait=False)
        except BlockingIOError:
            return  # The server or its deputy was faster.
        match received:
            case None:
                self._on_kernel_gone()
            case messages.StartSupervisor(), (sock_fd, reaped_fd):
                self._start_supervisor(sock_fd, reaped_fd)
            case unknown, _:
                msg = f"the fork server got an unknown message: {unknown!r}"
                raise TypeError(msg)

    def _on_kernel_gone(self) -> None:
        if self._server >= 0:  # It may be in the middle of its chores.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._server, signal.SIGKILL)
        self._is_done = True

    def _start_supervisor(self, sock_fd: int, reaped_fd: int) -> None:
        self._launches.note()
        try:
            pid = os.fork()
        except OSError:
            # The kernel learns of it by the end of file on the supervisor's channel.
            os.close(sock_fd)
            os.close(reaped_fd)
            return
        if pid == 0:
            self._let_go()
            self._channel.close()
            for fd in (*self._fds, reaped_fd):
                os.close(fd)
            self._become = lambda: run_supervisor(socket.socket(fileno=sock_fd))
            self._is_done = True
            return
        os.close(sock_fd)
        self._watch(pid, reaped_fd)

    def _let_go(self) -> None:
        """Close, in a process that was forked, what belongs to the children of its parent."""
        self._selector.close()
        for fds in self._children.values():
            for fd in fds:
                os.close(fd)
        self._children.clear()

    def _watch(self, pid: int, *fds: int) -> None:
        """Have a child reaped once it has ended, and these descriptors closed then."""
        pidfd = os.pidfd_open(pid)
        self._children[pid] = [pidfd, *fds]
        self._selector.register(pidfd, selectors.EVENT_READ, self._reap)

    def _reap(self) -> None:
        """Reap the children that have ended; may be called by a signal in the middle of another call."""
        for pid in list(self._children):
            try:
                has_ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
            except ChildProcessError:
                has_ended = True
            if has_ended and (fds := self._children.pop(pid, None)):
                self._selector.unregister(fds[0])
                for fd in fds:
                    os.close(fd)

    @property
    def _is_needed(self) -> bool:
        return not self._is_done and (not self._is_retired or bool(self._children))

    def _do_chores(self) -> None:
        """Do the chores, while a fork of this process serves in its place."""
        self._has_chores = False
        server = os.pidfd_open(os.getpid())
        theirs, ours = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # No room for a process: ranks do without the chores.
            pid = None
        if pid == 0:
            os.close(ours)
            self._become_deputy(server, theirs)
            return
        os.close(server)
        os.close(theirs)
        if pid is not None:
            self._watch(pid)
            with self._reaping():
                _do_chores(self._launches)
        os.close(ours)  # The deputy retires, now or when this process dies.

    @contextlib.contextmanager
    def _reaping(self) -> Iterator[None]:
        """Reap the supervisors that end inside this block: the kernel waits for that."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        try:
            self._reap()
            yield
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _become_deputy(self, server: int, done: int) -> None:
        self._let_go()
        self._listen()
        self._selector.register(done, selectors.EVENT_READ, lambda: self._retire(done))
        self._server = server
        self._fds += [server, done]

    def _retire(self, done: int) -> None:
        self._selector.unregister(done)
        self._selector.unregister(self._channel)
        self._channel.close()
        self._is_retired = True


def _nothing() -> None:
    """Do nothing: the server's own process just ends."""


def _freeze() -> None:
    # Objects that are never collected are never written to, so their pages stay shared.
    gc.collect()
    gc.freeze()
