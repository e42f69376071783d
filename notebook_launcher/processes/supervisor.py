"""The supervisor: one process per run, between the kernel and the ranks, which are its forks, each in its own session.

It starts ranks, reaps them, reports their exit statuses, sends them the signals that the kernel asks for, and hosts the
rendezvous store. It decides nothing, with one exception: when the kernel is gone, it kills every rank and exits. It
waits on descriptors only, and polls nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import time
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel
from notebook_launcher.processes import boot, leftovers
from notebook_launcher.processes.leftovers import SessionKiller, children, wait_for_end
from notebook_launcher.processes.libraries import libc, signal_at_parents_death
from notebook_launcher.processes.rank.rank import run_rank
from notebook_launcher.processes.rank.rank_process import RankStart

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.travel import FunctionCall


PR_SET_CHILD_SUBREAPER = 36
CLEANING = 1.0
"""Seconds for helpers of ranks that have ended to clean up; they take milliseconds."""
LATE = 0.1
"""Seconds after the limit of a detached run until its host is continued: usually it has begun to stop the ranks."""
CONTINUE_EVERY = 1.0
"""Seconds until it is continued again. A pause, or a question to the user, makes a run longer than its limit."""


def run_supervisor(sock: socket.socket, inherited_call: FunctionCall | None = None) -> NoReturn:
    """Serve the kernel at the other end of `sock` until it closes or dies, then exit; never returns.

    Args:
        sock: The supervisor's end of the channel.
        inherited_call: The first call, if this process is a fork of the kernel.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_at_parents_death(signal.SIGCONT)
    with contextlib.suppress(OSError, AttributeError):
        # Orphans of ranks (a data-loader worker whose rank was killed) become children of this process, so that
        # `kill_orphans` finds them.
        libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _end_with(lambda: _supervise(Channel(sock), inherited_call))


def _supervise(channel: Channel, inherited_call: FunctionCall | None) -> int:
    supervisor = Supervisor(channel)
    start = None
    try:
        start = supervisor.serve()
    except BaseException:  # the process ends here; the kernel reads the traceback from its stderr
        traceback.print_exc()
        channel.close()  # So that the kernel reports a failed supervisor, not ranks that were killed.
    if start is None:
        supervisor.kill_ranks()
        supervisor.kill_orphans()
        return 0
    # A rank that replaces another one is forked after the store was made. Its copy of the store must not be destroyed,
    # because the destructor would wait forever for the server's thread, which no fork has. So the process exits here,
    # while this frame and its callers' hold the store.
    _kept = supervisor.store
    del supervisor
    return _end_with(lambda: run_rank(start, inherited_call))


def _end_with(life: Callable[[], int]) -> NoReturn:
    """Exit with the status that the life of this forked process returns; after an exception, with 1."""
    status = 1
    try:
        status = life()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _spawn(start: RankStart) -> int:
    command, fds = boot.rank_command(start)
    try:
        process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
    finally:
        os.close(fds[-1])
    # The supervisor reaps by pid; Popen must not.
    process.returncode = 0
    return process.pid


class Supervisor:
    """Serves the kernel: starts, signals and reaps the ranks of this machine.

    Args:
        channel: The channel to the kernel, whose first record is the `Setup`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        """The supervisor's end of the channel to the kernel."""
        self._selector = selectors.DefaultSelector()
        """Everything that the supervisor waits for; the data of each key is the function to call."""
        self._pids: dict[int, int] = {}
        """By rank: the process number of each rank that has not been reaped."""
        self._pidfds: dict[int, int] = {}
        """By rank: a descriptor that becomes readable when the process exits."""
        self._oom_kills = math.inf  # Until it is known, a death is not blamed on memory.
        """The out-of-memory killer's count when the ranks were started."""
        self._killer = SessionKiller()
        self._setup: messages.Setup
        self.board_fd = -1
        """Descriptor of the board, which each rank's start carries."""
        self._listen_fd = -1
        """The socket at which the store listens."""
        self._kernel_pidfd = -1
        self._sigchld_pipe: tuple[int, ...] = ()
        """Python writes to this pipe at each SIGCHLD: a child has exited."""
        self.store: Any = None
        """The server of the rendezvous store; None until all ranks are forked, and on other nodes than the first."""
        self._has_all = False
        """True once all ranks of this machine have been started."""
        self._is_done = False
        """True once the kernel has closed or died, and in a forked child."""
        self._start: RankStart | None = None
        """In a forked child: the rank that it is to become."""

    def serve(self) -> RankStart | None:
        """Serve until the kernel closes or dies, and return None.

        In a forked child, return the start of the rank that the child is to become: by returning, the child sheds
        the supervisor's frames, which would otherwise appear in its every traceback.
        """
        first = self._channel.receive()
        if first is None:
            return None
        self._setup, (self.board_fd, self._listen_fd) = first
        boot.enter_kernel_surroundings(self._setup)
        # The end of file on the channel is not enough, because a process that the user's code forked from the kernel
        # may hold a copy of the kernel's end.
        with contextlib.suppress(OSError, AttributeError):
            self._kernel_pidfd = os.pidfd_open(self._setup.kernel_pid)
            self._selector.register(self._kernel_pidfd, selectors.EVENT_READ, self._end)
        self._watch_orphans()
        self._selector.register(self._channel, selectors.EVENT_READ, self._on_message)
        while not self._is_done:
            for key, _ in self._selector.select(self._continue_kernel_if_late()):
                key.data()
                if self._is_done:  # The next event's descriptor may belong to the parent.
                    break
        return self._start

    def _continue_kernel_if_late(self) -> float | None:
        """Continue a host that has not ended its run in time, as it may be stopped; return the seconds until then."""
        if self._setup.ends_at is None or self._kernel_pidfd < 0:
            return None
        late = time.monotonic() - self._setup.ends_at
        if late < LATE:
            return LATE - late
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._kernel_pidfd, signal.SIGCONT)
        return CONTINUE_EVERY

    def _watch_orphans(self) -> None:
        self._sigchld_pipe = os.pipe()
        for fd in self._sigchld_pipe:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # Python writes to the pipe only where it has a handler.
        signal.set_wakeup_fd(self._sigchld_pipe[1], warn_on_full_buffer=False)
        self._selector.register(self._sigchld_pipe[0], selectors.EVENT_READ, self._reap_orphans)

    def _end(self) -> None:
        self._is_done = True

    def _reap_orphans(self) -> None:
        # Each orphan by its number, and never just any child: `_on_gone` reaps the ranks and reports their exit.
        with contextlib.suppress(BlockingIOError):
            os.read(self._sigchld_pipe[0], 4096)
        for pid in set(children()) - set(self._pids.values()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _on_message(self) -> None:
        match self._channel.receive():
            case None | (messages.Close(), _):
                self._end()
            case messages.StartRank(rank=rank), fds:
                self._start_rank(rank, fds)
            case messages.SignalRanks(ranks=ranks, signum=signum), _:
                for rank in ranks:
                    self._signal(rank, signum)
            case unknown, _:
                raise TypeError(f"the supervisor got an unknown message: {unknown!r}")

    def _start_rank(self, rank: int, fds: list[int]) -> None:
        start = RankStart(
            rank=rank, setup=self._setup, channel_fd=fds[0], stdout_fd=fds[1], stderr_fd=fds[2],
            board_fd=self.board_fd,
        )  # fmt: skip
        try:
            pid = _spawn(start) if self._setup.start_method == "spawn" else os.fork()
        except OSError as error:
            pid = None
            self._send(messages.RankNotStarted(rank=rank, errno=error.errno or 0, message=error.strerror or str(error)))
        if pid == 0:
            self.close()
            self._start = start
            self._end()
            return
        for fd in fds:
            os.close(fd)
        if pid is None:
            return
        self._pids[rank] = pid
        self._pidfds[rank] = os.pidfd_open(pid)
        self._selector.register(self._pidfds[rank], selectors.EVENT_READ, lambda: self._on_gone(rank))
        self._send(messages.RankStarted(rank=rank, pid=pid))
        if not self._has_all and len(self._pids) == len(self._setup.place.ranks):
            self._has_all = True
            # After the ranks, because the store's server is a thread and ranks are to be forked from a process
            # with one thread. Until the server runs, connections wait in the listening socket's backlog.
            if self._setup.place.hosts_store:
                self.store = _host_store(self._setup, self._listen_fd)
            self._oom_kills = leftovers.oom_kills()

    def close(self) -> None:
        """Close the descriptors of this process that a rank has no use for."""
        self._channel.close()
        self._selector.close()
        signal.set_wakeup_fd(-1)
        for fd in (*self._pidfds.values(), *self._sigchld_pipe, self._listen_fd, self._kernel_pidfd):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _signal(self, rank: int, signum: int) -> None:
        pid = self._pids.get(rank)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                self._killer.kill(pid)
            else:
                os.kill(pid, signum)

    def _let_cleaners_end(self) -> None:
        """Wait a moment for helpers of ranks that have ended: they clean up, and then end by themselves."""
        until = time.monotonic() + CLEANING
        for pid in self._cleaners():
            wait_for_end(pid, until - time.monotonic())

    def _cleaners(self) -> list[int]:
        """Return the clean-up helpers of ended ranks, such as resource trackers; they are our children now."""
        return [pid for pid in set(children()) - set(self._pids.values()) if leftovers.cleans_up(pid)]

    def _on_gone(self, rank: int) -> None:
        pid = self._pids.pop(rank)
        if (pidfd := self._pidfds.pop(rank, None)) is not None:  # None: there was no descriptor left for one.
            self._selector.unregister(pidfd)
            os.close(pidfd)
        # Before the rank is reaped, so that its number cannot belong to another process yet.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_status == 0 and not self._cleaners():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        else:
            self._killer.kill(pid)
            self._let_cleaners_end()
        now = time.monotonic()
        _, status, usage = os.wait4(pid, 0)
        self._killer.remove_files()
        exitcode = os.waitstatus_to_exitcode(status)
        oom = exitcode == -signal.SIGKILL and leftovers.oom_kills() > self._oom_kills
        self._send(
            messages.RankExited(
                rank=rank, pid=pid, exitcode=exitcode, time=now, peak_rss=usage.ru_maxrss * 1024, oom=oom
            )
        )

    def _send(self, record: object) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(record)

    def kill_ranks(self) -> None:
        """Kill and reap every rank that has begun and is left."""
        for pid in self._pids.values():
            self._killer.kill(pid)
        for rank in list(self._pids):
            self._on_gone(rank)
        self._let_cleaners_end()

    def kill_orphans(self) -> None:
        """Kill and reap every other child: processes that have lost their parent, and ranks that have not begun."""
        while orphans := [pid for pid in children() if not leftovers.ends_by_itself(pid)]:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def main(fd: int) -> None:
    """Run a supervisor in a fresh interpreter; `fd` is its end of the channel."""
    run_supervisor(socket.socket(fileno=fd))


# --------------------------------------------------------------------------------------------------------------------
# The rendezvous store: its socket, and its server, which is a thread of the supervisor.


MIN_BACKLOG = 128
"""Connections that wait at the socket at least, until the server runs; the system allows 4,096."""


def bind_and_listen(place: messages.Place, num_processes: int, sock: socket.socket | None = None) -> socket.socket:
    """Return a socket at which the store of all ranks is to listen, and which listens already.

    Args:
        place: Its `store_address` is the address.
        num_processes: The number of all ranks, which may connect at once.
        sock: A socket that is bound already, perhaps; None: a new one.
    """
    sock = sock or socket.socket()
    if not sock.getsockname()[1]:
        sock.bind((place.store_address, 0))
    sock.listen(max(MIN_BACKLOG, num_processes))
    return sock


def _host_store(setup: messages.Setup, listen_fd: int) -> Any:
    """Return the server of the store at a socket that listens; it ends with the last reference to it."""
    # `wait_for_workers=False`: the constructor must not block; ranks come when they are ready.
    import torch
    from torch.distributed import TCPStore

    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen_fd}
    address = (setup.place.store_address, setup.master_port, setup.num_processes)
    # Before torch 2.8 the libuv server cannot take over a socket that listens, and logs an error if it is asked to
    # (pytorch#150215).
    libuv = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
    return TCPStore(*address, **options, use_libuv=libuv)
