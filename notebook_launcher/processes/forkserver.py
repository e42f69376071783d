"""The fork server: a clean process, one per kernel, from which supervisors are forked; it ends with the kernel.

It has imported torch and runs none of the user's code, so a fork of it has no OpenMP pool, no CUDA context and no other
thread, whatever the kernel did. After a moment without a launch, or some seconds of launches in a row, it imports what
the kernel has imported (`image.py`) and collapses its heap. Meanwhile a fork of it, its deputy, serves in its place; a
launch waits only for imports that its own ranks need. If the imports go wrong, the deputy becomes the server.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel, channel_pair
from notebook_launcher.processes import inherited, libraries
from notebook_launcher.processes.image import Image, NotCleanError, garbage_left
from notebook_launcher.processes.libraries import TENSORS_IN_HUGE_PAGES
from notebook_launcher.processes.notebook import frontend
from notebook_launcher.processes.rank import frameworks, rank_process, rendezvous
from notebook_launcher.processes.supervisor import run_supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Request: TypeAlias = tuple[messages.Imports | messages.StartSupervisor, list[int]]
    """A request of the kernel, with its descriptors."""


CHORES_AFTER = 0.2
"""Seconds without a launch before the chores begin, so that they begin while the first ranks run. Nine launches in a
row that each make an optimizer took 13 s with 2 s here, because every rank imported torch's compiler, and take 3 s."""
CHORES_AT_LAST = 5.0
"""Seconds after which the chores begin although launches follow one another, as in a cell that launches in a loop."""
MAX_IMPORT = 60.0
"""Seconds after which the import of one module counts as hanging. The slowest of 37 packages took 4 s in all."""
LOOK_EVERY = 5.0
"""Seconds between two looks of a deputy at its server's import."""


def main(fd: int) -> None:
    """Serve the kernel at the other end of descriptor `fd` until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel_pid = os.getppid()
    os.chdir("/")  # The kernel's folder may be deleted, and torch's modules cannot be imported in a deleted folder.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # Otherwise the import of NumPy starts a pool of threads.
    rank_process.open_streams()
    # The import takes seconds, on a busy machine a minute, in which the end of the channel would not be seen.
    signal.signal(signal.SIGCONT, lambda *_: None if os.getppid() == kernel_pid else os._exit(0))
    libraries.signal_at_parents_death(signal.SIGCONT)
    with garbage_left():
        _import_now()
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    _serve(Channel(socket.socket(fileno=fd)), kernel_pid)
    os._exit(0)  # The exit handlers of torch take 45 ms, and there is nothing to save.


def _serve(channel: Channel, owner_pid: int) -> None:
    """Live as the fork server of a kernel or a host; in a forked child, live as that child."""
    libraries.signal_at_parents_death(signal.SIGCONT)
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

    rendezvous.replace_group_functions()
    frontend.warm()
    frameworks.patch_when_imported()
    libraries.open_now()
    inherited.forget_exit_handlers()


class _Server:
    """Forks supervisors on request and reaps them: the fork server, or the deputy in its place."""

    def __init__(self, channel: Channel, kernel_pid: int) -> None:
        self._channel = channel
        self._children: dict[int, list[int]] = {}
        """By process number of each child: its pidfd, and other descriptors to close once the child is reaped."""
        self._image = Image()
        self._has_chores = True
        """True if the image lacks something, or the heap is not collapsed."""
        self._chores_at_last: float | None = None
        """When the chores begin even without a pause between launches; None while there are none to begin."""
        self._queue: deque[Request] = deque()
        """Requests that have been received, and are to be served next."""
        self._has_launched = False
        self._expects_launches = True
        """True if another launch is likely, which the chores are for: also before the first one, after `prewarm`."""
        self._is_retired = False
        """True in a deputy, or a server that could not stay one, that takes no more launches."""
        self._is_done = False
        """True once the kernel is gone, and in a forked child."""
        self._become: Callable[[], None] = lambda: None
        """In a forked child: its life as a supervisor or a host."""
        # The end of file on the channel is not enough, because a process that the user's code forked from the kernel
        # may hold a copy of the kernel's end.
        self._kernel_pidfd = os.pidfd_open(kernel_pid)
        self._server: _ServerAtWork | None = None
        """In a deputy: its server, which imports; otherwise None."""
        self._listen()

    def _listen(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_message)
        self._selector.register(self._kernel_pidfd, selectors.EVENT_READ, self._on_kernel_gone)

    def serve(self) -> Callable[[], None]:
        """Serve until the kernel is gone, and return a function that does nothing.

        In a forked child, return its life, as a supervisor or a host: by returning, the child sheds the server's
        frames, which would otherwise appear in its every traceback.
        """
        while not self._is_done and (self._children or not self._is_retired):
            if self._queue:
                self._on_request(*self._queue.popleft())
                continue
            gc.collect()
            gc.freeze()  # Objects that are never collected are never written to, so their pages stay shared.
            events = self._selector.select(self._due())
            if not events and self._may_do_chores:
                self._import(self._image.chores(), [])
            elif not events and self._server is not None and self._image.seconds_at_name() > MAX_IMPORT:
                self._server.kill()
            for key, _ in events[:1]:  # Only one, because the call may close the descriptor of the next event.
                key.data()
        return self._become

    def _due(self) -> float | None:
        """Return the seconds without a request until there is something to do; None: there is nothing."""
        if self._may_do_chores:
            now = time.monotonic()
            if self._chores_at_last is None:
                self._chores_at_last = now + CHORES_AT_LAST
            return min(CHORES_AFTER, max(0.0, self._chores_at_last - now))
        return None if self._server is None else LOOK_EVERY

    @property
    def _may_do_chores(self) -> bool:
        """True if this is the server, not its deputy or a predecessor, with chores left and a launch to expect."""
        return self._server is None and not self._is_retired and self._has_chores and self._expects_launches

    def _on_message(self) -> None:
        try:
            received = self._channel.receive(wait=False)
        except BlockingIOError:
            return  # The other one of the server and its deputy has received the record.
        if received is None:
            self._on_kernel_gone()
        else:
            self._on_request(*received)

    def _on_request(self, record: Any, fds: list[int]) -> None:
        match record:
            case messages.Imports():
                self._image.want(record)
                self._has_chores = True
                if self._server is not None:
                    self._server.held.append((record, fds))
            case messages.StartSupervisor():
                # A script may launch only once, and its ranks would share the cores with the chores for nothing.
                self._expects_launches = record.is_interactive or self._has_launched
                self._has_launched = True
                missing = self._image.to_do(record.needs)
                if missing and self._server is not None:
                    # The ranks would import the same beside the server, each on its own: to wait takes less.
                    self._server.held.append((record, fds))
                elif missing:
                    self._import(missing, [(record, fds), *self._queue])
                else:
                    self._begin(record, fds)
            case unknown:
                raise TypeError(f"the fork server got an unknown message: {unknown!r}")

    def _begin(self, request: messages.StartSupervisor, fds: list[int]) -> None:
        if isinstance(request, messages.StartHost):
            (host_fd,) = fds
            self._fork(lambda: _run_host(request.module, host_fd), host_fd)
            return
        sock_fd, reaped_fd = fds
        pid = self._fork(lambda: run_supervisor(socket.socket(fileno=sock_fd)), sock_fd, reaped_fd)
        if pid > 0:
            with contextlib.suppress(BrokenPipeError):  # The kernel is gone.
                os.write(reaped_fd, messages.FORKED.pack(pid, os.getpid()))

    def _on_kernel_gone(self) -> None:
        if self._server is not None:
            self._server.kill()
        self._is_done = True

    def _fork(self, become: Callable[[], None], fd: int, *reaped_fds: int) -> int:
        """Fork a child that takes `fd` and then lives as `become`; `reaped_fds` are closed once it has exited.

        Returns:
            The child's process number; 0 in the child, and -1 if the machine cannot hold it.
        """
        try:
            pid = os.fork()
        except OSError:  # The kernel notices this by the end of file on the child's channel.
            for each in (fd, *reaped_fds):
                os.close(each)
            return -1
        if pid == 0:
            self._close_watched()
            self._channel.close()
            for each in (self._kernel_pidfd, *reaped_fds):
                os.close(each)
            if self._server is not None:
                self._server.close()
            for _, waiting in self._queue:
                for each in waiting:
                    os.close(each)
            self._become = become
            self._is_done = True
            return 0
        os.close(fd)
        self._watch(pid, *reaped_fds)
        return pid

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

    def _import(self, names: list[str], waiting: list[Request]) -> None:
        """Import modules, while a fork of this process serves in its place, or for good if the imports go wrong.

        Args:
            names: The modules.
            waiting: Requests that wait for them; empty: nobody waits, so that launches go first.
        """
        self._queue.clear()
        self._chores_at_last = None
        self._image.note_progress(0)
        ours, theirs = channel_pair()
        work = _ServerAtWork(Channel(theirs), names, waiting)
        try:
            pid = os.fork()
        except OSError:  # There is no room for a process: ranks import by themselves.
            work.pass_over()
            ours.close()
            self._image.give_up(names)
            self._has_chores = False
            self._queue.extend(waiting)
            return
        if pid == 0:
            ours.close()
            self._become_deputy(work)
            return
        work.pass_over()
        self._watch(pid)
        try:
            with self._reaping():
                self._image.add(names)
                self._has_chores = bool(waiting or self._image.chores())
                if not self._has_chores:
                    libraries.collapse()
        except NotCleanError as error:
            ours.send(error)
            ours.close()
            self._retire_for(pid)
            return
        made = self._image.report()
        ours.send(made)  # Makes the deputy retire.
        while (held := ours.receive()) is not None:
            waiting.append(held)
        ours.close()
        self._channel.send_if_room(made)
        self._queue.extend(waiting)

    @contextlib.contextmanager
    def _reaping(self) -> Iterator[None]:
        """Reap the supervisors that exit inside this block, because the kernel waits for that; end with the kernel."""
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        # The deputy may be gone, too, and the end of the channel would be seen only after seconds of imports. The
        # parent may be a retired predecessor, whose end means nothing.
        kernel = [self._kernel_pidfd]
        signal.signal(signal.SIGCONT, lambda *_: os._exit(0) if select.select(kernel, [], [], 0)[0] else None)
        try:
            self._reap()
            yield
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def _become_deputy(self, server: _ServerAtWork) -> None:
        libraries.signal_at_parents_death(signal.SIGCONT)
        self._close_watched()
        self._listen()
        self._server = server
        self._selector.register(server.channel, selectors.EVENT_READ, self._on_server)

    def _on_server(self) -> None:
        """Retire for a server that has imported everything; become the server if it failed."""
        assert self._server is not None
        server, self._server = self._server, None
        received = server.channel.receive()
        self._selector.unregister(server.channel)
        match received:
            case (messages.ImageMade(), _):
                self._selector.unregister(self._channel)
                self._channel.close()
                self._is_retired = True
                server.take_back()
            case (NotCleanError() as failure, _):
                self._take_over(server, failure)
            case _:
                self._take_over(server, None)

    def _take_over(self, server: _ServerAtWork, failure: NotCleanError | None) -> None:
        self._image.note_failure(server.names, failure)
        self._has_chores = True
        self._chores_at_last = time.monotonic()  # Not once more after some seconds.
        self._channel.send_if_room(self._image.report())
        self._queue.extend([*server.waiting, *server.held])
        server.channel.close()
        os.close(server.pidfd)

    def _retire_for(self, successor: int) -> None:
        """Leave the place to the deputy, and end with the last child."""
        pidfd, *_ = self._children.pop(successor)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._selector.unregister(self._channel)
        self._channel.close()
        self._is_retired = True


class _ServerAtWork:
    """In a deputy: the server that imports, what waits for it, and what it is to be told when it is done.

    Args:
        channel: Channel to the server.
        names: The modules that it imports.
        waiting: The requests that it serves afterwards; the deputy serves them if the server fails.
    """

    def __init__(self, channel: Channel, names: list[str], waiting: list[Request]) -> None:
        self.channel = channel
        self.names = names
        self.waiting = waiting
        self.held: list[Request] = []
        """Requests that have come since, for the server to serve."""
        self.pidfd = os.pidfd_open(os.getpid())

    def kill(self) -> None:
        """Kill the server."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def pass_over(self) -> None:
        """Close, in the server itself, what its deputy has."""
        self.channel.close()
        os.close(self.pidfd)

    def take_back(self) -> None:
        """Hand over to the server what it is to serve, and close everything."""
        for request, fds in self.held:
            with contextlib.suppress(OSError):
                self.channel.send(request, fds)
        self.close()

    def close(self) -> None:
        """Close the descriptors of this process."""
        self.pass_over()
        for _, fds in (*self.waiting, *self.held):
            for fd in fds:
                os.close(fd)


def _run_host(module: str, host_fd: int) -> None:
    """Live as a host, whose life is `main` of a module, outside the fork server's family.

    Its own fork server is a fork of this process.
    """
    os.setsid()  # A kernel is killed with its session, and a terminal sends its signals to one.
    if os.fork():
        return  # The server reaps this process now, so that the host outlives it.
    ours, theirs = channel_pair()
    host_pid = os.getpid()
    server_pid = os.fork()
    if server_pid == 0:
        ours.close()
        os.close(host_fd)
        _serve(Channel(theirs), host_pid)
        return
    theirs.close()
    libraries.name_process("host")
    importlib.import_module(module).main(host_fd, ours, server_pid)
