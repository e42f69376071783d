"""One node, as the kernel sees it: the way to its agent, and the link over it. It outlives launches."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster import node_records
from notebook_launcher.engines.cluster.connections import MARK, Greeting, version_difference, versions
from notebook_launcher.engines.kernel_imports import KernelImports
from notebook_launcher.messaging.links import Link, LinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from notebook_launcher.engines.cluster.connections import CommandConnection
    from notebook_launcher.engines.cluster.ray_connections import RayConnection


PING_EVERY = 1.0
PATIENCE = 10.0
"""Seconds of silence after which a node counts as lost; its agent sends a record every second."""
CHUNK = 1 << 20
"""Bytes of a parcel that are sent at once; other records may go between two chunks."""
AT_ONCE = 256
"""Items of the outbox that are sent at once, beside the first."""
END_PATIENCE = 10.0
"""Longest wait in seconds for an agent's end after the request."""
GREETING_LINES = 1000
"""Lines that a login may print before the agent's greeting."""


class Node:
    """One agent. Records to it are queued, so that a network that hangs does not delay the kernel."""

    def __init__(self, number: int, connection: CommandConnection | RayConnection, receiver: Receiver) -> None:
        self.number = number
        self.greeting: Greeting | None = None
        """The agent's first line; None before it, and if the agent never came up."""
        self.address = ""
        """The address that the node has taken for the ranks; empty before."""
        self.imports = KernelImports()
        """What the kernel has imported, as the node was told."""
        self.has_folder = True
        """False if the kernel's working directory is not on the node's disks."""
        self.asked_for: Path | None = None
        """The folder about which the node was asked last."""
        self.port = 0
        """The port at which the store of the next tree will listen, if it is on this node."""
        self.lost = ""
        """The reason why the node is gone; empty while it lives."""
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Takes `(node, record)` for each event; the present tree's."""
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Answers to what was asked; None when the node is lost."""
        self._closings: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """`TreeClosed`, apart from answers: who waits for one of these drops all others."""
        self.offset = 0.0
        """Seconds by which the kernel's monotonic clock is ahead of the node's."""
        self._round_trip = float("inf")
        """The shortest time that a ping took, from which `offset` was measured."""
        self._num_lines = 0
        """Lines that arrived before the greeting."""
        self._has_greeted = False
        self._is_understood = False
        """True once the agent has greeted, and is of the versions of this kernel."""
        self.connection = connection
        """The way to the agent."""
        self.read_fd = connection.read_fd
        """Descriptor at which the agent's records arrive."""
        self._link = Link(connection.read_fd, connection.write_fd, math.inf)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Records, parcels and, as None, the end."""
        self._urgent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Records that go between two chunks of a parcel."""
        self._threads = [threading.Thread(target=self._deliver, name=f"notebook-launcher node {number}", daemon=True)]
        self._threads[0].start()
        self._receiver = receiver
        receiver.add(self)

    def __str__(self) -> str:
        host = "" if self.greeting is None else f" ({self.greeting.host}, {self.address or 'no address yet'})"
        return f"node {self.number}{host}"

    def send(self, record: object, *, urgent: bool = False) -> None:
        """Send a record; with `urgent` before the rest of a parcel that is under way. Never waits."""
        if urgent:
            self._urgent.put(record)
            self._outbox.put(_URGENT)
        else:
            self._outbox.put(record)

    def reply(self, is_wanted: Callable[[Any], bool], until: float) -> Any:
        """Wait for a reply that is wanted and return it; None if the node is lost, or at the time `until`."""
        return self._await(self.replies, is_wanted, until)

    def await_closed(self, tree: int, until: float) -> bool:
        """Wait until a tree is closed; return False if the node is lost, or at the time `until`."""
        return self._await(self._closings, lambda closed: bool(closed.tree == tree), until) is not None

    def _await(self, source: queue.SimpleQueue[Any], is_wanted: Callable[[Any], bool], until: float) -> Any:
        with contextlib.suppress(queue.Empty):
            while not self.lost or not source.empty():
                record = source.get(timeout=max(0.0, until - time.monotonic()))
                if record is not None and is_wanted(record):
                    return record
        return None

    def send_parcel(self, fd: int) -> None:
        """Send the contents of a file, which may be closed at once."""
        self._outbox.put(_ParcelFile(fd))

    def _deliver(self) -> None:
        with contextlib.suppress(OSError):  # The thread that receives notices that the link has ended.
            while self._deliver_some():
                pass
        self._link.close_sending()

    def _deliver_some(self) -> bool:
        """Send what waits, or a ping; return False at the end."""
        # In one write: over Ray, each write is a call of an actor, which takes 1 ms of both processes.
        records: list[Any] = []
        for item in self._waiting():
            if item is None:
                self._link.send(*records)
                return False
            if isinstance(item, _ParcelFile):
                self._deliver_parcel(item, records)
            elif item is _URGENT:
                records += self._take_urgent()
            else:
                records.append(item)
        self._link.send(*records)
        return True

    def _waiting(self) -> Iterator[Any]:
        """Yield the first item of the outbox, for which this waits, and those that are there then."""
        try:
            yield self._outbox.get(timeout=PING_EVERY)
        except queue.Empty:
            yield node_records.Ping(time.monotonic())
        with contextlib.suppress(queue.Empty):
            for _ in range(AT_ONCE):
                yield self._outbox.get_nowait()

    def _take_urgent(self) -> list[Any]:
        taken: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._urgent.get_nowait())
        return taken

    def _deliver_parcel(self, parcel: _ParcelFile, records: list[Any]) -> None:
        """Send records and a parcel after them, except its last chunk, which is appended to the records."""
        with parcel.file:
            at, size = 0, os.fstat(parcel.file.fileno()).st_size
            while at < size or not at:
                if at:
                    self._link.send(*records)
                    records[:] = self._take_urgent()
                data = os.pread(parcel.file.fileno(), CHUNK, at)
                records.append(node_records.ParcelChunk(data, is_first=not at))
                at += max(1, len(data))

    @property
    def patience(self) -> float:
        """Seconds of silence after which the node counts as lost. A command may take long until its agent is up."""
        return PATIENCE if self._has_greeted else math.inf

    def read(self) -> list[Any]:
        """Read what has arrived, and return what is whole of it: `Greeting` first, then records.

        Records of an agent of other versions are not unpickled.

        The receiver calls this when the link is readable, then `take` for each record, and `lose` at the end.

        Raises:
            LinkError: The link has ended.
        """
        self._link.read()
        greeting = [] if self._has_greeted else self._find_greeting()
        return greeting + (self._link.whole_records() if self._is_understood else [])

    def _find_greeting(self) -> list[Any]:
        while (line := self._link.next_line()) is not None:
            if line.startswith(MARK):
                self._has_greeted = True
                greeting = Greeting.from_line(line)
                self._is_understood = not version_difference(versions(), greeting.versions)
                return [greeting]
            self._num_lines += 1
            if self._num_lines == GREETING_LINES:
                raise LinkError("the first lines of its output hold no greeting of an agent")
        return []

    def take(self, record: Any, now: float) -> None:
        """Take a record that arrived at the time `now`."""
        match record:
            case node_records.Pong(sent, there):
                self._note_clock(sent, there, now)
            case node_records.Beat():
                pass
            case node_records.Happened() | node_records.BoardWritten():
                self.inbox.put((self, record))
            case node_records.Joined(port):
                self.port = port
                self.replies.put(record)
            case node_records.TreeClosed(_, port):
                self.port = port
                self._closings.put(record)
            case _:
                self.replies.put(record)

    def _note_clock(self, sent: float, there: float, now: float) -> None:
        """Measure the clock's offset again if the round trip was short; long ones are inaccurate."""
        if now - sent <= 1.5 * self._round_trip:
            self._round_trip = min(self._round_trip, now - sent)
            self.offset = (sent + now) / 2 - there

    def lose(self, error: OSError) -> None:
        """Note that the link has ended, or that the agent is silent; never waits."""
        if self.lost:
            self._lose(error)
            return
        name = f"notebook-launcher node {self.number}"
        thread = threading.Thread(target=self._lose, args=(error,), name=name, daemon=True)
        thread.start()  # Because a command may take a second to end.
        self._threads.append(thread)

    def _lose(self, error: OSError) -> None:
        self.lost = self.lost or self.connection.why() or str(error)
        self.send(None)
        self.replies.put(None)
        self._closings.put(None)
        self.inbox.put((self, None))

    def close(self) -> None:
        """End the agent, its ranks and what carried the link, and release everything; idempotent."""
        patience = END_PATIENCE if self._has_greeted and not self.lost else 0.0
        self.lost = self.lost or "it was closed"
        self.send(None)
        if not patience:
            self._link.give_up()  # The agent may be stopped, and take nothing.
        self.connection.end(patience)
        self._link.give_up()
        self._receiver.remove(self)
        for thread in self._threads:
            thread.join()
        while not self._outbox.empty():
            if isinstance(item := self._outbox.get(), _ParcelFile):
                item.file.close()
        self._link.close()


_URGENT = object()
"""In the outbox: an urgent record waits."""


class _ParcelFile:
    """A file on its way to a node."""

    def __init__(self, fd: int) -> None:
        self.file = open(os.dup(fd), "rb", buffering=0)  # noqa: SIM115 - until it was sent, or the node is closed


# --------------------------------------------------------------------------------------------------------------------
# The thread that receives from the agents of one set of nodes.


LOOK_EVERY = 0.5
"""Seconds between two looks for nodes that are silent."""


class Receiver:
    """Reads the links of all nodes in one thread, which starts with the first node.

    A thread for each of 125 nodes, woken with every message, took a tenth of a core, of which the records themselves
    cost a tenth. This thread reads from all nodes that have sent something before it passes on any record.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._lock = threading.Lock()
        """Held while links are read, and while nodes are added or removed."""
        self._heard: dict[Node, float] = {}
        """The nodes whose links are read, each with the time, as in `_watched`, at which bytes last arrived."""
        self._watched = 0.0
        """Seconds that the thread has spent waiting: only then a node that sends nothing is silent."""
        self._looked_at = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, node: Node) -> None:
        """Read the link of a node from now on."""
        with self._lock:
            self._heard[node] = self._watched
            self._selector.register(node.read_fd, selectors.EVENT_READ, node)
            if self._thread is None:
                self._thread = threading.Thread(target=self._receive, name="notebook-launcher nodes", daemon=True)
                self._thread.start()

    def remove(self, node: Node) -> None:
        """Read the link of a node no more; idempotent."""
        with self._lock:
            self._drop(node)

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._lock:
            self._is_closed = True
            if self._thread is not None:
                os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._thread = None
            if self._wake_fd >= 0:
                self._selector.close()
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _receive(self) -> None:
        while not self._is_closed:
            began = time.monotonic()
            ready = self._selector.select(LOOK_EVERY)
            waited = time.monotonic() - began
            with self._lock:
                self._watched += waited
                arrived = [(key.data, self._read(key.data)) for key, _ in ready if key.data in self._heard]
                now = time.monotonic()
                for node, records in arrived:
                    self._pass_on(node, records, now)
                if self._watched - self._looked_at >= LOOK_EVERY:
                    self._looked_at = self._watched
                    self._look_for_silent_nodes()

    def _read(self, node: Node) -> list[Any]:
        self._heard[node] = self._watched
        try:
            return node.read()
        except OSError as error:
            self._lose(node, error)
        except Exception as error:  # a record that this kernel cannot unpickle: an agent of another kind
            self._lose(node, LinkError(f"{type(error).__name__}: {error}"))
        return []

    @staticmethod
    def _pass_on(node: Node, records: list[Any], now: float) -> None:
        for record in records:
            node.take(record, now)

    def _look_for_silent_nodes(self) -> None:
        silent = {node: node.patience for node in self._heard if self._watched - self._heard[node] >= node.patience}
        for node, patience in silent.items():
            self._lose(node, LinkError(f"no message arrived for {patience:g} s"))

    def _lose(self, node: Node, error: OSError) -> None:
        self._drop(node)
        node.lose(error)

    def _drop(self, node: Node) -> None:
        if self._heard.pop(node, None) is not None:
            with contextlib.suppress(KeyError, OSError):
                self._selector.unregister(node.read_fd)
