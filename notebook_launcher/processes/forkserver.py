"""The fork server: a clean process, one per kernel, from which supervisors are forked.

The fork server has imported torch and runs none of the user's code. A process forked from it therefore has no
OpenMP pool, no CUDA context and no other thread, whatever the kernel did before. The server exits with the kernel.

After a moment without a launch, if another one is likely, the server does its chores, which take seconds. No launch
waits for them: the server first forks a deputy, which serves launches in its place until the chores are done.

For a minute after a detached launch the server keeps a spare host, which serves the next one. After a launch that
another one of its kind is likely to follow it keeps, for as long, spare ranks that have joined their group; so does the
deputy while it serves.

    server ──fork──▶ imports, huge pages ──────────────▶ serves again
       └──▶ deputy   serves                        closes its channel; ends with its last supervisor
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING

from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel
from notebook_launcher.processes import inherited, libraries
from notebook_launcher.processes.chores import LaunchClock, do_chores, garbage_left, import_compiler
from notebook_launcher.processes.host_process import run_host, run_spare_host
from notebook_launcher.processes.huge_pages import TENSORS_IN_HUGE_PAGES
from notebook_launcher.processes.notebook import frontend
from notebook_launcher.processes.rank import frameworks, group_functions, rank_process
from notebook_launcher.processes.spare_supervisor import run_spare_supervisor
from notebook_launcher.processes.spares import Spares
from notebook_launcher.processes.supervisor import run_supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["main"]

CHORES_AFTER = 0.2
"""Seconds without a launch before the chores begin, so that they begin while the first ranks run. Nine launches in a
row that each make an optimizer took 13 s with 2 s here, because every rank imported torch's compiler, and take 3 s."""


def main(fd: int) -> None:
    """Serve the kernel at the other end of descriptor `fd` until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel_pid = os.getppid()
    os.chdir("/")  # The kernel's folder may be deleted, and torch's modules cannot be imported in a deleted folder.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # Otherwise the import of NumPy starts a pool of threads.
    rank_process.open_streams()
    with garbage_left():
        _import_now()
    _serve(Channel(socket.socket(fileno=fd)), kernel_pid)
    os._exit(0)  # The exit handlers of torch take 45 ms, and there is nothing to save.


def _serve(channel: Channel, owner_pid: int) -> None:
    """Live as the fork server of a kernel or a host; in a forked child, live as that child."""
    become = _Server(channel, owner_pid).serve()
    become()


def _import_now() -> None:
    for name, value in TENSORS_IN_HUGE_PAGES.items():
        os.environ.setdefault(name, value)
    import torch.distributed
    import torch.nn.parallel

    torch.empty(1)  # torch reads the variable here, and not in a rank, whose environment is the kernel's.

    with contextlib.suppress(ImportError):
        import numpy.random  # noqa: F401 - ranks seed it, and NumPy 2 imports it at its first use.

    group_functions.replace_group_functions()
    frontend.warm()
    frameworks.patch_when_imported()
    libraries.open_now()
    inherited.forget_exit_handlers()


class _Server:
    """Forks supervisors on request and reaps them: the fork server, or the deputy in its place."""

    def __init__(self, channel: Channel, kernel_pid: int) -> None:
        self._channel = channel
        self._fds: list[int] = []
        """Descriptors, besides the channel, that a forked supervisor has to close."""
        self._children: dict[int, list[int]] = {}
        """By process number of each child: its pidfd, and other descriptors to close once the child is reaped."""
        self._has_chores = True
        """True until the chores have begun."""
        self._has_launched = False
        self._expects_launches = True
        """True if another launch is likely, which the chores are for: also before the first one, after `prewarm`."""
        self._launches = LaunchClock()
        pid = os.getpid()  # The server's, also in its deputy: by this number spare processes name themselves.
        self._spares = Spares(
            partial(run_spare_host, _serve, server_pid=pid), partial(run_spare_supervisor, server_pid=pid)
        )
        self._is_retired = False
        """True in a deputy that takes no more launches."""
        self._is_done = False
        """True once the kernel is gone, and in a forked child."""
        self._become: Callable[[], None] = _nothing
        """In a forked child: its life as a supervisor or a host."""
        self._kernel_pidfd = -1
        """The pidfd of the kernel; -1 if the kernel is gone, or the system has no pidfds."""
        # The end of file on the channel is not enough, because a process that the user's code forked from the kernel
        # may hold a copy of the kernel's end.
        with contextlib.suppress(OSError, AttributeError):
            self._kernel_pidfd = os.pidfd_open(kernel_pid)
            self._fds.append(self._kernel_pidfd)
        self._server_pidfd = -1
        """In a deputy: the pidfd of its server; otherwise -1."""
        self._listen()

    def _listen(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_message)
        if self._kernel_pidfd >= 0:
            self._selector.register(self._kernel_pidfd, selectors.EVENT_READ, self._on_kernel_gone)

    def serve(self) -> Callable[[], None]:
        """Serve until the kernel is gone, and return a function that does nothing.

        In a forked child, return its life, as a supervisor or a host: by returning, the child sheds the server's
        frames, which would otherwise appear in its every traceback.
        """
        while self._is_needed:
            _freeze()
            has_chores = self._has_chores and self._expects_launches
            events = self._selector.select(CHORES_AFTER if has_chores else self._spares.due())
            if not events and has_chores:
                self._do_chores()
            elif not events:
                self._keep_spares()
            for key, _ in events[:1]:  # Only one, because the call may close the descriptor of the next event.
                key.data()
        return self._become

    def _on_message(self) -> None:
        try:
            received = self._channel.receive(wait=False)
        except BlockingIOError:
            return  # The other one of the server and its deputy has received the record.
        match received:
            case None:
                self._on_kernel_gone()
            case messages.StartSupervisor() as request, (sock_fd, reaped_fd):
                self._note_launch(request)
                self._start_supervisor(request, sock_fd, reaped_fd)
            case messages.StartHost() as request, (host_fd,):
                self._note_launch(request)
                if not self._spares.take_host(request, host_fd):
                    self._fork(lambda: run_host(_serve, request.module, host_fd), host_fd)
                # A host that is forked before the chores would do them all by itself.
                if not self._has_chores and self._server_pidfd < 0:
                    self._spares.expect_host(request.module)
            case unknown, _:
                raise TypeError(f"the fork server got an unknown message: {unknown!r}")

    def _note_launch(self, request: messages.StartSupervisor | messages.StartHost) -> None:
        """Note that a launch comes, and prepare for it what its ranks would otherwise do."""
        # A script may launch only once, and its ranks would share the cores with 1.6 s of work for nothing.
        self._expects_launches = request.is_interactive or self._has_launched
        self._has_launched = True
        if request.uses_compiler and self._has_chores:
            import_compiler()

    def _start_supervisor(self, request: messages.StartSupervisor, sock_fd: int, reaped_fd: int) -> None:
        pid = self._spares.take_ranks(request, sock_fd)
        if pid is not None:
            self._children[pid].append(reaped_fd)
        else:
            pid = self._fork(lambda: run_supervisor(socket.socket(fileno=sock_fd)), sock_fd, reaped_fd)
        if pid > 0:
            self._spares.note_launch(pid, request)

    def _on_kernel_gone(self) -> None:
        if self._server_pidfd >= 0:  # This is the deputy: the server may be in the middle of its chores.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._server_pidfd, signal.SIGKILL)
        self._is_done = True

    def _fork(self, become: Callable[[], None], fd: int, *reaped_fds: int) -> int:
        """Fork a child that takes `fd` and then lives as `become`; `reaped_fds` are closed once it has exited.

        Returns:
            The child's process number; 0 in the child, and -1 if the machine cannot hold it.
        """
        self._launches.note()
        try:
            pid = os.fork()
        except OSError:  # The kernel notices this by the end of file on the child's channel.
            for each in (fd, *reaped_fds):
                os.close(each)
            return -1
        if pid == 0:
            self._close_watched()
            self._spares.dismiss()
            self._channel.close()
            for each in (*self._fds, *reaped_fds):
                os.close(each)
            self._become = become
            self._is_done = True
            return 0
        os.close(fd)
        self._watch(pid, *reaped_fds)
        return pid

    def _keep_spares(self) -> None:
        """Fork the spare processes that are missing, and dismiss those that nobody has needed."""
        for spare in self._spares.tend():
            spare.start(self._fork)
            if self._is_done:
                return  # This is the child.

    def _close_watched(self) -> None:
        """Close the descriptors that belong to the parent's children; call it in a forked process."""
        self._selector.close()
        for fds in self._children.values():
            for fd in fds:
                os.close(fd)
        self._children.clear()

    def _watch(self, pid: int, *fds: int) -> None:
        """Register a child, to be reaped once it has exited; these descriptors are closed then."""
        pidfd = os.pidfd_open(pid)
        self._children[pid] = [pidfd, *fds]
        self._selector.register(pidfd, selectors.EVENT_READ, self._reap)

    def _reap(self) -> None:
        """Reap the children that have exited; a signal handler may call this in the middle of another call."""
        for pid in list(self._children):
            try:
                has_ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
            except ChildProcessError:
                has_ended = True
            if has_ended and (fds := self._children.pop(pid, None)):
                self._selector.unregister(fds[0])
                for fd in fds:
                    os.close(fd)
                self._spares.note_end(pid, may_expect=not self._is_retired)

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
        except OSError:  # There is no room for a process: ranks do without the chores.
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
                do_chores(self._launches)
            self._keep_spares()  # Before the deputy dismisses its own.
        os.close(ours)  # Makes the deputy retire; the death of this process would do the same.

    @contextlib.contextmanager
    def _reaping(self) -> Iterator[None]:
        """Reap the supervisors that exit inside this block, because the kernel waits for that."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        try:
            self._reap()
            yield
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _become_deputy(self, server: int, done: int) -> None:
        self._close_watched()  # No spare process waits before the chores, but one may be expected.
        self._listen()
        self._selector.register(done, selectors.EVENT_READ, lambda: self._retire(done))
        self._server_pidfd = server
        self._fds += [server, done]

    def _retire(self, done: int) -> None:
        self._selector.unregister(done)
        self._selector.unregister(self._channel)
        self._channel.close()
        self._spares.dismiss()
        self._is_retired = True


def _nothing() -> None:
    """Do nothing: the role of a server that is done."""


def _freeze() -> None:
    # Objects that are never collected are never written to, so their pages stay shared.
    gc.collect()
    gc.freeze()
