"""The agent: a process on each node of a launch, which runs the ranks of its node and relays to the kernel.

    kernel ══link══▶ agent ── ProcessTree ── fork server, supervisor, ranks of this node

To its process tree the agent is the kernel, so that a node has everything that a launch on one machine has: output of
C code, exit statuses, stacks, leftovers removed. The agent decides nothing, with one exception: when the link has
ended, or no message arrived for PATIENCE seconds, it kills its ranks and exits.

    python -m notebook_launcher.engines.cluster.agent

The link is the agent's standard input and output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster import node_records
from notebook_launcher.engines.cluster.cluster_tree import path_of_archive
from notebook_launcher.engines.cluster.connections import Greeting
from notebook_launcher.engines.cluster.node_records import HeldEvents
from notebook_launcher.engines.engine import FromRank, RankLost, SupervisorLost
from notebook_launcher.engines.fork_server_handle import fork_server, start_by_spawn
from notebook_launcher.engines.process_tree import ProcessTree
from notebook_launcher.errors import ResourceError
from notebook_launcher.messaging import board_layout, messages
from notebook_launcher.messaging.channel import AnonymousFile
from notebook_launcher.messaging.links import Link, LinkError
from notebook_launcher.processes.libraries import signal_at_parents_death

if TYPE_CHECKING:
    from notebook_launcher.engines.engine import Event

PATIENCE = 30.0
"""Seconds of silence after which the kernel counts as gone. Its pings come every second."""
BEAT_EVERY = 1.0
TELL_EVERY = 0.25
"""Seconds between two reports of the ranks' state."""


class Agent:
    """Serves the kernel at the other end of a link until that has ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Commands that have arrived and were not carried out yet; None at the end."""
        self._network = node_records.Join("127.0.0.1", "lo")
        self._listener: socket.socket | None = None
        """The bound socket of the next tree's store; None while a tree has it."""
        self._tree: ProcessTree | None = None
        self._number = 0
        """Number of the present tree, or the last one."""
        self._epoch = 0
        """Number of times that the kernel has written the whole board."""
        self._parcel: AnonymousFile | None = None
        self._modules: AnonymousFile | None = None
        """The archive of modules that ranks of the next or present tree import from."""
        self._held = HeldEvents()
        self._exited: set[int] = set()
        self._is_finishing = False
        self._told_at = 0.0
        self._told_safepoint: int | None = None
        """The epoch for which the kernel was told that there is a safepoint."""

    def serve(self) -> None:
        """Carry out what the kernel sends; return when it is gone, with no process left."""
        for target in (self._receive, self._beat):
            threading.Thread(target=target, daemon=True).start()
        try:
            while self._serve_some():
                pass
        finally:
            self._close_tree()
            fork_server().stop()

    def _receive(self) -> None:
        try:
            while True:
                record = self._link.receive(PATIENCE)
                if isinstance(record, node_records.Ping):
                    self._link.send(node_records.Pong(record.time, time.monotonic()))
                else:
                    self._put(record)
        except Exception:  # the link has ended, or something has spoilt it, so that nothing unpickles
            self._link.give_up()  # The main thread may wait for room in it.
            self._put(None)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                time.sleep(BEAT_EVERY)
                self._link.send(node_records.Beat())

    def _put(self, record: Any) -> None:
        self._commands.put(record)
        if (tree := self._tree) is not None:
            tree.wake()

    def _serve_some(self) -> bool:
        """Carry out what has arrived, and relay what has happened; return False at the end."""
        while self._tree is None or not self._commands.empty():
            record = self._commands.get()
            if record is None:
                return False
            self._obey(record)
        self._relay(self._tree.events(min(TELL_EVERY, self._held.next_due(time.monotonic()))))
        return True

    def _obey(self, record: Any) -> None:
        match record:
            case node_records.Join():
                self._network = record
                if self._listener is not None:
                    self._listener.close()
                self._listener = None
                self._bind()
                self._tell(node_records.Joined(self._port))
                fork_server().start(os.environ)
            case node_records.LookForFile(path):
                self._tell(node_records.FileSeen(path, Path(path).exists()))
            case node_records.Modules(archive):
                self._modules = AnonymousFile("modules")
                with open(self._modules.fileno(), "wb", closefd=False) as file:
                    file.write(archive)
            case node_records.StartTree(tree, setup, imports):
                self._start_tree(tree, setup, imports)
            case node_records.ParcelChunk(data, is_first):
                self._add_to_parcel(data, is_first=is_first)
            case node_records.CloseTree():
                self._tell(self._closed())
            case node_records.FinishTree() if self._tree is None:
                self._tell(node_records.TreeClosed(self._number, self._port))
            case _ if self._tree is not None:
                self._obey_for_tree(record, self._tree)

    def _obey_for_tree(self, record: Any, tree: ProcessTree) -> None:
        match record:
            case node_records.ToRank(rank, payload, has_parcel):
                parcel = [self._parcel.fileno()] if has_parcel and self._parcel is not None else []
                tree.send(rank, payload, parcel)
            case node_records.Signal(ranks, signum):
                tree.signal(ranks, signum)
            case node_records.Replace(rank):
                self._exited.discard(rank)
                try:
                    tree.replace(rank)
                except ResourceError as error:
                    self._tell(node_records.Happened(self._number, (_not_started(rank, error),)))
            case node_records.FinishTree():
                self._is_finishing = True
                tree.finish()
                self._relay([])
            case node_records.KillSupervisor():
                tree.kill_supervisor()
            case node_records.BoardWrite(at, data, epoch, number):
                tree.board.memory[at : at + len(data)] = data
                self._epoch = epoch
                if number:
                    self._tell(node_records.BoardWritten(self._number, number))
            case node_records.AskStacks(number, method, args):
                self._tell(node_records.StacksAnswered(number, getattr(tree.stacks, method)(*args)))
            case unknown:
                raise TypeError(f"the agent got an unknown message: {unknown!r}")

    def _bind(self) -> None:
        # The port is known before a launch, which therefore needs no answer first. Nothing listens until then.
        if self._listener is None:
            self._listener = socket.socket()
            self._listener.bind((self._network.address, 0))

    @property
    def _port(self) -> int:
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def _start_tree(self, number: int, setup: messages.Setup, imports: messages.Imports | None) -> None:
        if imports is not None:
            fork_server().tell(imports)
        self._number, self._epoch = number, 0
        self._exited, self._is_finishing = set(), False
        self._held = HeldEvents()
        # Ranks have no state before they have joined their group.
        self._told_at, self._told_safepoint = time.monotonic(), None
        setup = _at_home(setup, self._network.interface)
        if self._modules is not None:
            setup = dataclasses.replace(setup, sys_path=[*setup.sys_path, path_of_archive(self._modules.fileno())])
        listener = None
        if setup.place.hosts_store:
            listener, self._listener = self._listener, None
        starter = start_by_spawn if setup.start_method == "spawn" else fork_server().starter(setup)
        try:
            self._tree = ProcessTree(setup, starter, listener)
        except ResourceError as error:
            # All of them: the run waits for the outcome of each rank.
            failed = tuple(_not_started(rank, error) for rank in setup.place.ranks)
            self._tell(node_records.Happened(number, failed))

    def _add_to_parcel(self, data: bytes, *, is_first: bool) -> None:
        if is_first or self._parcel is None:
            self._parcel = AnonymousFile("call")
        with open(self._parcel.fileno(), "ab", closefd=False) as file:
            file.write(data)

    def _relay(self, happened: list[Event]) -> None:
        tree, now = self._tree, time.monotonic()
        assert tree is not None
        self._held.add(map(_carried, happened), now, are_calm=self._is_finishing)
        self._exited.update(event.exited.rank for event in happened if isinstance(event, RankLost))
        is_lost = any(isinstance(event, SupervisorLost) for event in happened)
        if self._is_finishing and (is_lost or self._exited.issuperset(tree.setup.place.ranks)):
            last = node_records.Happened(self._number, self._held.take())
            self._tell(last, self._closed())  # In one write, because the kernel waits for both.
            return
        # Who sees the curve of the first update may ask for a change at once.
        is_first_safepoint = bool(tree.board.memory[board_layout.HAS_SAFEPOINT]) and self._told_safepoint != self._epoch
        is_due = is_first_safepoint or now - self._told_at >= TELL_EVERY
        if is_due:
            self._told_at = now
        if is_first_safepoint:
            self._told_safepoint = self._epoch
        if is_due or not self._held.next_due(now):
            state = self._state(tree) if is_due else None
            self._tell(node_records.Happened(self._number, self._held.take(), state))
        if is_lost:
            self._close_tree()

    def _state(self, tree: ProcessTree) -> node_records.NodeState:
        ranks, memory = tree.setup.place.ranks, tree.board.memory

        def of_ranks(start: int) -> bytes:
            return bytes(memory[start + ranks[0] : start + ranks[-1] + 1])

        return node_records.NodeState(
            self._epoch,
            bool(memory[board_layout.HAS_SAFEPOINT]),
            of_ranks(board_layout.COOPERATIVE),
            of_ranks(board_layout.ACTIVITY),
            {rank: size for rank in ranks if (size := tree.memory(rank)) is not None},
            tree.pulses(ranks),
        )

    def _tell(self, *records: object) -> None:
        with contextlib.suppress(OSError):  # The thread that receives notices that the link has ended.
            self._link.send(*records)

    def _closed(self) -> node_records.TreeClosed:
        self._close_tree()
        self._bind()
        return node_records.TreeClosed(self._number, self._port)

    def _close_tree(self) -> None:
        tree, self._tree = self._tree, None
        self._held.take()
        if tree is not None:
            tree.close()
        self._parcel = self._modules = None


def _not_started(rank: int, error: ResourceError) -> messages.RankNotStarted:
    """Return the record of a rank that could not be started, with the reason alone: the kernel names rank and limit."""
    cause = error.__cause__
    # The end of a fork server's channel tells no reason; the error has the server's last words.
    refusal = cause if isinstance(cause, OSError) and not isinstance(cause, ConnectionError) else error
    return messages.RankNotStarted(rank=rank, errno=error.errno or 0, message=refusal.strerror or str(refusal))


def _carried(event: Event) -> Any:
    """Return an event that can travel: with the contents of its descriptors' files."""
    if not isinstance(event, FromRank) or not event.fds:
        return event
    blobs = []
    for fd in event.fds:
        with open(fd, "rb") as file:
            file.seek(0)
            blobs.append(file.read())
    return node_records.Carried(event.rank, event.record, tuple(blobs))


def _at_home(setup: messages.Setup, interface: str) -> messages.Setup:
    """Return the settings for ranks of this node: its own import path and environment, in which `env=` wins."""
    missing = [entry for entry in setup.sys_path if Path(entry).is_dir() and entry not in sys.path]
    return dataclasses.replace(
        setup,
        kernel_pid=os.getpid(),
        ends_at=None,
        environ={**os.environ, **setup.environ},
        # After the node's own, of which the kernel's interpreter may have another version.
        sys_path=[*sys.path, *missing],
        cwd=setup.cwd if Path(setup.cwd).is_dir() else str(Path.home()),
        place=dataclasses.replace(setup.place, interface=interface),
    )


def main() -> None:
    """Serve the kernel at the other end of standard input and output until it is gone."""
    signal_at_parents_death(signal.SIGCONT)
    read_fd, write_fd = os.dup(0), os.dup(1)
    # Whatever prints here must not get into the link.
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    # With `-m`, the working directory comes first on the import path.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    os.write(write_fd, Greeting.of_this_machine().to_line())
    with contextlib.suppress(LinkError):
        Agent(Link(read_fd, write_fd, PATIENCE)).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
