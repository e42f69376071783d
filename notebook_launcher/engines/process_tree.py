"""Ranks on this machine: the kernel's end of the process tree.

    kernel                             outside
    ProcessTree ───channel──────────▶ supervisor
        │  ╲                              │ starts, reaps, signals
        │   ╲──channel, stdout, stderr─▶ rank 0 … rank N-1

`ProcessTree` is the `Tree` of one machine. `ClusterTree`, that of several, has the same methods.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import mmap
import os
import select
import selectors
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.board import Board, Pulse, resident_memory
from notebook_launcher.engines.engine import FromRank, Output, RankLost, SupervisorLost, Woken
from notebook_launcher.errors import LaunchError, ResourceError
from notebook_launcher.messaging import board_layout, messages
from notebook_launcher.messaging.channel import AnonymousFile, channel_pair
from notebook_launcher.processes.supervisor import bind_and_listen
from notebook_launcher.wording import describe_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from notebook_launcher.engines.engine import Event, Stream
    from notebook_launcher.engines.fork_server_handle import Starter, SupervisorHandle


READ_SIZE = 1 << 20
RECORDS_AT_ONCE = 4
"""The most records of one rank in one batch of events: a short call's begin and end come together."""
CLOSE_PATIENCE = 10.0
"""Longest wait in seconds for a supervisor to kill and reap its ranks: to free the memory of a GPU takes seconds."""
KILL_PATIENCE = 0.3
LOOK_EVERY = 0.1
"""Seconds between two looks whether the deadline of a wait is nearer now."""


class ProcessTree:
    """A supervisor and its ranks.

    A new tree starts the ranks of this machine.

    Args:
        setup: The settings of all ranks; `setup.place` names the ranks of this machine.
        start_supervisor: One of the ways to start a supervisor.
        listener: A bound socket at which the store is to listen, which the tree closes. None: one of its own.

    Raises:
        ResourceError: The machine cannot hold the ranks.
    """

    def __init__(self, setup: messages.Setup, start_supervisor: Starter, listener: socket.socket | None = None) -> None:
        self.setup = setup
        """The settings of all ranks, with the port of the store once the tree has started."""
        self._pipes: dict[int, RankPipes] = {}
        self._listener = listener
        self._supervisor_gone = False
        self._supervisor: SupervisorHandle | None = None
        """None before the start and after `close`."""
        self._closing = contextlib.ExitStack()
        try:
            self._open()
            self._start(start_supervisor)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, LaunchError):
                raise _refused(f"cannot start {setup.num_processes} ranks", error) from error
            raise

    def _open(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._closing.callback(self._selector.close)
        self._wake_r, self._wake_w = socket.socketpair()
        self._closing.callback(self._wake_r.close)
        self._closing.callback(self._wake_w.close)
        self._wake_r.setblocking(False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, self._on_wake)
        self._board_file = AnonymousFile("board")
        self._closing.callback(self._board_file.close)
        os.ftruncate(self._board_file.fileno(), board_layout.BOARD_SIZE)
        memory = mmap.mmap(self._board_file.fileno(), board_layout.BOARD_SIZE)
        self._closing.callback(memory.close)
        self.board = Board(memory)
        self._channel, self._their_channel = channel_pair()
        self._closing.callback(self._channel.close)
        self._closing.callback(self._their_channel.close)
        for rank in self.setup.place.ranks:
            self._pipes[rank] = RankPipes()

    def _start(self, start_supervisor: Starter) -> None:
        with self._their_channel, self._listen() as listener:
            # A fork of the kernel must close its copies of the kernel's descriptors: otherwise the other side would
            # not see that the kernel closes them.
            kernel_fds = [fd for pipes in self._pipes.values() for fd in (*pipes.ours(), *pipes.theirs())]
            kernel_fds += [self._channel.fileno(), self._wake_r.fileno(), self._wake_w.fileno(), listener.fileno()]
            self._supervisor = start_supervisor(self._their_channel, kernel_fds)
            self._selector.register(self._channel, selectors.EVENT_READ, self._on_supervisor)
            with contextlib.suppress(ConnectionError):
                self._channel.send(self.setup, [self._board_file.fileno(), listener.fileno()])
                for rank in self._pipes:
                    self._start_rank(rank)

    def _listen(self) -> socket.socket:
        """Return the store's socket; on nodes that host no store, one that is not bound."""
        place = self.setup.place
        listener, self._listener = self._listener or socket.socket(), None
        if place.hosts_store:
            bind_and_listen(place, self.setup.num_processes, listener)
            self.setup = dataclasses.replace(self.setup, master_port=listener.getsockname()[1])
        return listener

    def _start_rank(self, rank: int) -> None:
        pipes = self._pipes[rank]
        self._channel.send(messages.StartRank(rank=rank), pipes.theirs())
        pipes.close_theirs()
        self._selector.register(pipes.channel, selectors.EVENT_READ, functools.partial(self._on_record, rank))
        for fd, stream in pipes.streams.items():
            take = functools.partial(self._on_output, rank, stream, fd)
            self._selector.register(fd, selectors.EVENT_READ, take)

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that lives."""
        # A copy, since views read this while the run's thread adds and removes ranks.
        return {rank: pipes.pid for rank, pipes in list(self._pipes.items()) if pipes.pid is not None}

    def send(self, rank: int, record: object, fds: Sequence[int] = ()) -> None:
        """Send a record to a rank. No error is raised for a rank that is gone, because its exit is an event."""
        with contextlib.suppress(OSError):
            self._pipes[rank].channel.send(record, fds)

    def send_all(self, record: object, fds: Sequence[int] = ()) -> None:
        """Send a record to every rank, and a copy of each descriptor beside it."""
        for rank in self.setup.place.ranks:
            self.send(rank, record, fds)

    def finish(self) -> None:
        """Have every rank that is idle run its exit handlers and exit."""
        self.send_all(messages.Finish())

    def signal(self, ranks: tuple[int, ...], signum: int) -> None:
        """Have the supervisor send a signal; SIGKILL also goes to the ranks' data-loader workers."""
        with contextlib.suppress(OSError):
            self._channel.send(messages.SignalRanks(ranks=ranks, signum=signum))
        if signum == signal.SIGKILL:
            self._signal_supervisor(signal.SIGCONT)  # It may be stopped.

    def _signal_supervisor(self, signum: int) -> None:
        if self._supervisor is not None and not self._supervisor_gone:
            self._supervisor.send_signal(signum)

    def kill_supervisor(self) -> None:
        """Kill a supervisor that does not answer; its ranks die with it."""
        self._signal_supervisor(signal.SIGKILL)

    def replace(self, rank: int) -> None:
        """Start a rank again after its process has exited; raises `ResourceError` if the machine cannot hold it."""
        self._drop(rank)
        try:
            self._pipes[rank] = RankPipes()
            self._start_rank(rank)
        except OSError as error:
            what = f"cannot restart rank {rank} of {self.setup.num_processes}, whose process has ended"
            raise _refused(what, error) from error

    def wake(self) -> None:
        """Make `events` return; from any thread."""
        with contextlib.suppress(OSError):
            self._wake_w.send(b"\0")

    def events(self, timeout: float | None) -> list[Event]:
        """Wait up to `timeout` seconds for events and return them.

        Output that a rank wrote before it sent a record comes before the record; output that it writes after
        `Channel.send_and_wait` comes after the record.
        """
        happened: list[Event] = []
        for key, _ in self._selector.select(timeout):
            happened += key.data()
        return happened

    @property
    def is_dying(self) -> bool:
        """True if a rank has closed its channel and the supervisor has not reported its exit yet."""
        return any(pipes.has_hung_up and pipes.pid is not None for pipes in self._pipes.values())

    def drain(self, rank: int) -> list[Event]:
        """Return the rank's output that has not been read yet."""
        happened: list[Event] = []
        for fd, stream in list(self._pipes[rank].streams.items()):
            while chunk := self._on_output(rank, stream, fd):
                happened += chunk
        return happened

    def _on_wake(self) -> list[Event]:
        with contextlib.suppress(BlockingIOError):
            self._wake_r.recv(4096)
        return [Woken()]

    def _on_output(self, rank: int, stream: Stream, fd: int) -> list[Event]:
        if fd not in self._pipes[rank].streams:
            return []  # An earlier event of the same batch has read the pipe to its end.
        try:
            data = os.read(fd, READ_SIZE)
        except BlockingIOError:
            return []
        if data:
            return [Output(rank, stream, data)]
        self._selector.unregister(fd)
        del self._pipes[rank].streams[fd]
        os.close(fd)
        return []

    def _on_record(self, rank: int) -> list[Event]:
        pipes = self._pipes[rank]
        happened: list[Event] = []
        for _ in range(RECORDS_AT_ONCE):
            # Before the record is received: a rank that shows rich output continues to write once it is received.
            happened += self.drain(rank)
            try:
                received = pipes.channel.receive(wait=False)
            except BlockingIOError:
                break
            if received is None:
                self._selector.unregister(pipes.channel)
                pipes.has_hung_up = True
                break
            happened += self._record(rank, *received)
        return happened

    def _record(self, rank: int, record: Any, fds: list[int]) -> list[Event]:
        if isinstance(record, messages.RankReady):
            self._pipes[rank].stacks_fd = fds[0]
            return []
        return [FromRank(rank, record, fds)]

    def _on_supervisor(self) -> list[Event]:
        received = self._channel.receive()
        if received is None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._channel)
            self._supervisor_gone = True
            return [SupervisorLost(self._supervisor.last_words() if self._supervisor else "")]
        record, _ = received
        match record:
            case messages.RankStarted(rank=rank, pid=pid):
                self._pipes[rank].pid = pid
            case messages.RankExited(rank=rank):
                self._pipes[rank].pid = None
                happened = self.drain(rank)
                with contextlib.suppress(OSError):
                    while (last := self._pipes[rank].channel.receive(wait=False)) is not None:
                        happened += self._record(rank, *last)
                return [*happened, RankLost(record)]
            case messages.RankNotStarted():
                pass
            case _:
                raise TypeError(f"the kernel got an unknown message from the supervisor: {record!r}")
        return [record]

    @property
    def stacks(self) -> StackFiles:
        """The files into which the ranks write their stacks."""
        return StackFiles(self._pipes, self.signal)  # Kept, it would make a cycle for the garbage collector.

    def memory(self, rank: int) -> int | None:
        """Return the resident memory of a rank in bytes; None: the rank is gone."""
        pid = self.pids.get(rank)
        return None if pid is None else resident_memory(pid)

    def pulses(self, ranks: Iterable[int]) -> dict[int, Pulse]:
        """Return the activity of these ranks' processes, without processes that are gone."""
        pids = self.pids
        read = {rank: Pulse.read(pids[rank]) for rank in ranks if rank in pids}
        return {rank: pulse for rank, pulse in read.items() if pulse is not None}

    def close(self, deadline: Callable[[], float] | None = None) -> None:
        """Kill the remaining processes, wait until they are reaped, and close every descriptor; idempotent.

        Args:
            deadline: Returns the time at which the wait is given up; called again and again. None: some seconds.
        """
        if self._supervisor is not None:
            with contextlib.suppress(OSError):
                self._channel.send(messages.Close())
            self._signal_supervisor(signal.SIGCONT)
            usual = time.monotonic() + CLOSE_PATIENCE
            self._await_end(lambda: usual if deadline is None else min(usual, deadline()))
            if not self._supervisor_gone:
                self.kill_supervisor()
                killed = time.monotonic()
                self._await_end(lambda: killed + KILL_PATIENCE)
            self._supervisor.wait_reaped()
            self._supervisor = None
        for pid in self.pids.values():
            # Needed only if the supervisor was killed: its ranks die with it, but processes that a rank started do not.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for rank in list(self._pipes):
            self._drop(rank)
        self._closing.close()

    def _await_end(self, deadline: Callable[[], float]) -> None:
        # For the end of the channel, which comes even if the fork server, which would reap the supervisor, is dead.
        arrived = select.poll()
        arrived.register(self._channel, select.POLLIN)
        while not self._supervisor_gone and (left := deadline() - time.monotonic()) > 0:
            if not arrived.poll(1e3 * min(left, LOOK_EVERY)):
                continue
            for event in self._on_supervisor():
                if isinstance(event, FromRank):
                    event.close()

    def _drop(self, rank: int) -> None:
        pipes = self._pipes.pop(rank)
        for fd in pipes.ours():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        pipes.close()


def _refused(what: str, error: OSError) -> ResourceError:
    """Return the error where the system refuses what a rank needs, with what to do."""
    general = "Use fewer ranks, or free what is used up; doctor() shows the limits of this machine."
    advice = describe_limit(error.errno) or general
    return ResourceError(error.errno, f"{what}: {error.strerror or error}. {advice}")


# --------------------------------------------------------------------------------------------------------------------
# The kernel's ends of one rank's channel and pipes.


PIPE_SIZE = 1 << 20
"""The largest size that an unprivileged process may ask for, so that a rank can print in bursts without waiting."""
F_SETPIPE_SZ = 1031


class RankPipes:
    """The kernel's end of one rank: its channel, its output and its process number."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """Process number; None before the rank has started and after it has exited."""
        self.stacks_fd: int | None = None
        """Descriptor of the file to which the rank writes its stacks; None until the rank is ready."""
        self.has_hung_up = False
        self.channel, self.their_channel = channel_pair()
        """The kernel's end, and the rank's until it is handed over."""
        self.streams: dict[int, Stream] = {}
        """By descriptor: the pipes from which the kernel reads the rank's output."""
        self.their_streams: list[int] = []
        """Descriptors to which the rank writes, until they are handed over."""
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        try:
            for stream in streams:
                ours, theirs = os.pipe()
                self.streams[ours] = stream
                self.their_streams.append(theirs)
                os.set_blocking(ours, False)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(ours, F_SETPIPE_SZ, PIPE_SIZE)
        except OSError:
            self.close()
            raise

    def ours(self) -> list[int]:
        """Return the descriptors that the kernel watches: the channel and the pipes of the rank's output."""
        return [self.channel.fileno(), *self.streams]

    def theirs(self) -> list[int]:
        """Return the descriptors that the rank gets: its channel, its standard output, its standard error."""
        return [self.their_channel.fileno(), *self.their_streams]

    def close_theirs(self) -> None:
        """Close the descriptors that the rank has got; idempotent."""
        self.their_channel.close()
        while self.their_streams:
            os.close(self.their_streams.pop())

    def close(self) -> None:
        """Close every descriptor; idempotent."""
        self.close_theirs()
        self.channel.close()
        for fd in self.streams:
            os.close(fd)
        self.streams.clear()
        if self.stacks_fd is not None:
            os.close(self.stacks_fd)
            self.stacks_fd = None


# --------------------------------------------------------------------------------------------------------------------
# The files into which the ranks of this machine write their stacks, at a signal, as `faulthandler` writes them.


QUIET = 0.02
"""Seconds without growth after which a dump of stacks counts as complete."""
BUDGET = 0.5


class StackFiles:
    """The files of stacks of a process tree's ranks (`NodeStacks` are those of several machines)."""

    def __init__(self, pipes: Mapping[int, RankPipes], signal: Callable[[tuple[int, ...], int], None]) -> None:
        self._pipes = pipes
        self._signal = signal

    def dump(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the stacks of all threads of these ranks, or of every live rank.

        There is no sign that a dump is complete, so it is read once it has not grown for QUIET seconds.
        """
        wanted = None if ranks is None else set(ranks)
        starts = {rank: size for rank, size in self.sizes().items() if wanted is None or rank in wanted}
        self._signal(tuple(starts), messages.DUMP_SIGNAL)
        sizes, began = starts, time.monotonic()
        now = changed = began
        while now - began < BUDGET:
            time.sleep(QUIET / 4)
            new, now = {rank: self._size(rank) for rank in starts}, time.monotonic()
            if new != sizes:
                sizes, changed = new, now
            elif now - changed > QUIET and all(sizes[rank] > starts[rank] for rank in starts):
                break
        return self.read(starts)

    def sizes(self) -> dict[int, int]:
        """Return the number of bytes that each rank that is up has written into its file."""
        up = {rank for rank, pipes in self._pipes.items() if pipes.pid is not None and pipes.stacks_fd is not None}
        return {rank: self._size(rank) for rank in sorted(up)}

    def request(self) -> None:
        """Have every rank that is up write its stacks, without waiting for them; the signal would kill others."""
        self._signal(tuple(self.sizes()), messages.DUMP_SIGNAL)

    def read(self, starts: Mapping[int, int]) -> dict[int, str]:
        """Return what ranks have written into their files after these positions."""
        fds = {rank: self._fd(rank) for rank in starts}
        return {
            rank: os.pread(fd, max(0, self._size(rank) - starts[rank]), starts[rank]).decode(errors="replace")
            for rank, fd in fds.items()
            if fd is not None
        }

    def _fd(self, rank: int) -> int | None:
        pipes = self._pipes.get(rank)
        return None if pipes is None else pipes.stacks_fd

    def _size(self, rank: int) -> int:
        fd = self._fd(rank)
        return 0 if fd is None else os.fstat(fd).st_size
