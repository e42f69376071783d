"""Ranks that are forked ahead: they have joined their process group, and wait for the launch that takes them.

    fork server ──channel──▶ spare supervisor ──a channel each──▶ spare rank 0 … spare rank N-1

Until then nothing of the launch is known but its kind, so they hold what depends on the kind alone: the environment,
the import path, the working directory and the group, whose store the spare supervisor hosts.

A person at a prompt is likely to launch again, as when a cell is run again and again. In a script the first launch of a
kind shows nothing about the next one; after the second one in a row a third is likely.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING

from notebook_launcher.messaging.channel import Channel, channel_pair
from notebook_launcher.processes import boot, inherited, libraries
from notebook_launcher.processes.rank import rank_process
from notebook_launcher.processes.rank.rank import serve_kernel
from notebook_launcher.processes.rank.rendezvous import Rendezvous, torchrun_environment
from notebook_launcher.processes.supervisor import NewRanks, bind_and_listen, end_with, host_store, lead, supervise

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from notebook_launcher.messaging import messages
    from notebook_launcher.processes.rank.rank_process import RankStart

MAX_SPARE_RANKS = 8
"""The most ranks that are kept: each holds some MB that it does not share."""
SPARES_AFTER = 0.1
"""Seconds without a request before spare ranks are forked."""
KEPT_FOR = 60.0
"""Seconds after a launch for which they wait for the next one."""
LOOPBACK = "127.0.0.1"
"""Address of the store where all ranks are on the kernel's machine."""
BACKENDS = ("gloo", "nccl", None)
"""Backends whose group holds no memory of a GPU before its first collective; None: no group."""


def kind_of_launch(setup: messages.Setup) -> messages.Setup | None:
    """Return the settings that spare ranks share with their launch; None for a launch that gets no spare ranks.

    Ranks take the others (the run's number, the random states, and whether a session's calls follow) from the launch
    itself.
    """
    is_small = setup.num_processes <= MAX_SPARE_RANKS
    # Between two launches nothing may listen in a network.
    is_here = setup.place.num_nodes == 1 and setup.place.store_address == LOOPBACK
    if setup.backend not in BACKENDS or not (is_small and is_here):
        return None
    return dataclasses.replace(
        setup, run_id="", ends_at=None, random=None, rank_seeds=None, many_calls=False, keeps_failures=False,
        master_port=0,
    )  # fmt: skip


class SpareRanks:
    """The fork server's side: the spare ranks of at most one launch, which end with it, by the end of file."""

    def __init__(self) -> None:
        self._name = f"spare {os.getpid()}"  # The server's number, also in its deputy.
        self._kind: messages.Setup | None = None
        """Kind of the launch that is expected, or was expected last."""
        self._until = -math.inf
        """Until then, by the monotonic clock, a launch of this kind is expected."""
        self._channel: Channel | None = None
        """The channel to the supervisor that waits; None if none does."""
        self._pid = -1
        """Process number of the newest one; -1 if there was none, or the machine could not hold it."""
        self._last: messages.Setup | None = None
        """Kind of the last launch; None if such launches get no spare ranks."""
        self._running: set[int] = set()
        """The supervisors of launches."""
        self._heralds: dict[int, messages.Setup] = {}
        """The kinds of those launches after which another one of their kind is likely, by supervisor."""

    def due(self) -> float | None:
        """Return the seconds without a request until `tend` has something to do; None: it has nothing to do."""
        left = self._until - time.monotonic()
        if self._channel is None:
            return SPARES_AFTER if left > 0 else None
        return max(0.0, left)

    def tend(self, fork: Callable[[Callable[[], None], int], int]) -> None:
        """Fork spare ranks that are expected, or dismiss those that nobody has needed.

        Args:
            fork: Forks a process that lives as its first argument, closes the descriptor in this process, and returns
                the process number.
        """
        is_expected = time.monotonic() < self._until
        if not is_expected:
            self.dismiss()
        elif self._channel is None:
            assert self._kind is not None
            self._channel, theirs = channel_pair()
            kind, fd, name = self._kind, theirs.detach(), self._name
            self._pid = fork(lambda: _wait_for_launch(kind, fd, name), fd)

    def take(self, request: messages.StartSupervisor, fd: int) -> int | None:
        """Hand a launch and its descriptor, which is closed here, to spare ranks; expect no further launch.

        Returns:
            Their supervisor's process number; None, without effect on the descriptor, if there are none for it.
        """
        kind, channel = kind_of_launch(request.setup), self._channel
        if channel is None or kind is None or kind != self._kind:
            self.dismiss()  # They would hold memory while other ranks run.
            return None
        self._channel, self._until = None, -math.inf
        with contextlib.closing(channel):
            try:
                channel.send(request, [fd])
            except OSError:  # The system has killed them.
                return None
        os.close(fd)
        return self._pid

    def note_launch(self, pid: int, request: messages.StartSupervisor) -> None:
        """Note that this supervisor serves a launch; sessions do not count, because they last."""
        if request.setup.many_calls:
            return
        kind = kind_of_launch(request.setup)
        self._running.add(pid)
        if kind is not None and (request.is_interactive or kind == self._last):
            self._heralds[pid] = kind
        self._last = kind

    def note_end(self, pid: int, *, may_expect: bool) -> None:
        """Note that a process has ended; if another launch is likely now and `may_expect` holds, expect it.

        While other launches run, none is expected: spare ranks would take processor time from them.
        """
        self._running.discard(pid)
        kind = self._heralds.pop(pid, None)
        if kind is not None and may_expect and not self._running:
            if kind != self._kind:
                self.renew()
            self._kind, self._until = kind, time.monotonic() + KEPT_FOR

    def renew(self) -> None:
        """End the spare ranks, which others are to replace: they lack what this process is about to import."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def dismiss(self) -> None:
        """End the spare ranks; in a fork of this process, close the copy of their channel."""
        self.renew()
        self._until = -math.inf


def _wait_for_launch(kind: messages.Setup, fd: int, name: str) -> NoReturn:
    """Live as the supervisor of spare ranks: start them, wait for the launch that takes them, and supervise them.

    Exits if the fork server ends or has no use for the ranks, and if a rank dies.
    """
    end_with(lambda: _live(kind, Channel(socket.socket(fileno=fd)), name))


def _live(kind: messages.Setup, channel: Channel, name: str) -> int:
    own_name = libraries.name_process(name)
    lead()
    boot.enter_kernel_surroundings(kind)
    ranks = _RanksAhead(kind)
    if (own := ranks.fork()) is not None:
        channel.close()
        rank, from_supervisor = own
        return _wait_as_rank(rank, ranks.kind, from_supervisor, own_name)
    received = channel.receive() if ranks.wait(channel) else None
    channel.close()
    if received is None:
        ranks.kill()
        return 0
    libraries.name_process(own_name)
    _, (kernel_fd,) = received
    return supervise(socket.socket(fileno=kernel_fd), ranks)


class _RanksAhead(NewRanks):
    """The ranks of a spare supervisor, and the store in which they have met."""

    def __init__(self, kind: messages.Setup) -> None:
        self._channels: dict[int, tuple[int, Channel]] = {}
        """By rank that waits: its process number, and the channel that takes its start."""
        self._listener = bind_and_listen(kind.place, kind.num_processes)
        """The socket of the store."""
        self.kind = dataclasses.replace(kind, master_port=self._listener.getsockname()[1])
        """Their settings, with the port of the store."""

    def fork(self) -> tuple[int, Channel] | None:
        """Fork the ranks and return None; in a rank, return its number and the channel to its supervisor."""
        for rank in self.kind.place.ranks:
            ours, theirs = channel_pair()
            pid = os.fork()
            if pid == 0:
                self._listener.close()
                for channel in (ours, *(channel for _, channel in self._channels.values())):
                    channel.close()
                return rank, Channel(theirs)
            theirs.close()
            self._channels[rank] = pid, ours
        self.store = host_store(self.kind, self._listener.detach())
        return None

    def wait(self, channel: Channel) -> bool:
        """Wait until a launch arrives or the other end is closed; return False if a rank has died meanwhile."""
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            for pid in self.waiting:
                poll.register(fd := os.pidfd_open(pid), select.POLLIN)
                stack.callback(os.close, fd)
            return all(fd == channel.fileno() for fd, _ in poll.poll())

    @property
    def waiting(self) -> set[int]:
        """The processes that wait to become ranks."""
        return {pid for pid, _ in self._channels.values()}

    def enter(self, setup: messages.Setup) -> messages.Setup:
        """Enter the kernel's folder, which may be another of its name; return the settings with the store's port."""
        boot.enter_folder(setup)
        return dataclasses.replace(setup, master_port=self.kind.master_port)

    def begin(self, start: RankStart) -> int:
        """Hand a waiting rank its start, and return its process number; fork a rank if it has begun before."""
        if start.rank not in self._channels:
            return os.fork()
        pid, channel = self._channels.pop(start.rank)
        with contextlib.suppress(OSError), contextlib.closing(channel):  # A rank that has died is reaped soon.
            channel.send(start, [start.channel_fd, start.stdout_fd, start.stderr_fd, start.board_fd])
        return pid

    def kill(self) -> None:
        """Kill and reap the ranks that still wait."""
        for pid in self.waiting:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _wait_as_rank(rank: int, kind: messages.Setup, channel: Channel, name: str) -> int:
    """Join the group ahead, wait at the channel for the launch, and serve the kernel; return the exit status."""
    rank_process.begin()
    inherited.forget_parent(kind.start_method)
    os.environ.update(torchrun_environment(kind, rank))
    rendezvous = Rendezvous(rank, kind)
    rank_process.set_threads(kind.threads_per_process)
    rendezvous.join(0)
    if kind.use_gpu:
        rank_process.start_driver()
    received = channel.receive()
    channel.close()
    if received is None:
        return 0
    libraries.name_process(name)
    start, (channel_fd, stdout_fd, stderr_fd, board_fd) = received
    start = dataclasses.replace(
        start, channel_fd=channel_fd, stdout_fd=stdout_fd, stderr_fd=stderr_fd, board_fd=board_fd
    )
    boot.enter_folder(start.setup)  # The folder may have been replaced by another of its name.
    importlib.invalidate_caches()  # The user may have written modules meanwhile.
    rank_process.redirect_output(start)
    return serve_kernel(start, rendezvous)
