"""One node, as the kernel sees it: the way to its agent, and the link over it. It outlives launches."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.cluster import node_records
from notebook_launcher.engines.cluster.connections import MARK, Greeting, version_difference
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
AT_ONCE = 256
"""Items of the outbox that are sent at once, beside the first."""
END_PATIENCE = 10.0
GREETING_LINES = 1000
"""Lines that a login may print before the agent's greeting."""


class Node:
    """One agent. Records to it are queued, so that a network that hangs does not delay the kernel."""

    def __init__(self, number: int, connection: CommandConnection | RayConnection) -> None:
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
        self._has_greeted = False
        self.connection = connection
        self._link = Link(connection.read_fd, connection.write_fd, math.inf)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Records, parcels and, as None, the end."""
        self._urgent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"notebook-launcher node {number}", daemon=True)
            for target in (self._deliver, self._receive)
        ]
        for thread in self._threads:
            thread.start()

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

    def _receive(self) -> None:
        try:
            greeting = self._await_greeting()
            self._has_greeted = True
            self.replies.put(greeting)
            is_alike = not version_difference(greeting.versions)
            while is_alike:  # Otherwise nothing of it is unpickled.
                self._take(self._link.receive(PATIENCE), time.monotonic())
        except (
            Exception
        ) as error:  # the link has ended, is silent, or something has spoilt it, so that nothing unpickles
            self.lost = self.lost or self.connection.why()
            self.lost = self.lost or (str(error) if isinstance(error, OSError) else repr(error))
            self.send(None)
            self.replies.put(None)
            self._closings.put(None)
            self.inbox.put((self, None))

    def _await_greeting(self) -> Greeting:
        for _ in range(GREETING_LINES):  # However long it takes until the agent is up.
            if (line := self._link.read_line()).startswith(MARK):
                return Greeting.from_line(line)
        raise LinkError("the first lines of its output hold no greeting of an agent")

    def _take(self, record: Any, now: float) -> None:
        """Take a record that arrived at the time `now`."""
        match record:
            case node_records.Pong(sent, there):
                self._note_clock(sent, there, now)
            case node_records.Beat():
                pass
            case node_records.Happened() | node_records.BoardWritten():
                self.inbox.put((self, record))
            case node_records.TreeClosed(_, port):
                self.port = port
                self._closings.put(record)
            case _:
                if isinstance(record, node_records.Joined):
                    self.port = record.port
                self.replies.put(record)

    def _note_clock(self, sent: float, there: float, now: float) -> None:
        """Measure the clock's offset again if the round trip was short; long ones are inaccurate."""
        if now - sent <= 1.5 * self._round_trip:
            self._round_trip = min(self._round_trip, now - sent)
            self.offset = (sent + now) / 2 - there

    def close(self) -> None:
        """End the agent, its ranks and what carried the link, and release everything; idempotent."""
        patience = END_PATIENCE if self._has_greeted and not self.lost else 0.0
        self.lost = self.lost or "it was closed"
        self.send(None)
        if not patience:
            self._link.give_up()  # The agent may be stopped, and take nothing.
        self.connection.end(patience)
        self._link.give_up()
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
