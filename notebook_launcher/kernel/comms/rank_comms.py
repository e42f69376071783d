"""Comms of the ranks' widgets, between the page and the ranks, for as long as the ranks live.

A rank's messages go to the cell in which the rank runs. The page's messages come in the thread that reads the kernel's
shell channel while a cell is busy (`kernel/comms/tap.py`), otherwise in the main thread. They wait here for the
rank: at most one is on its way to a rank, so that a rank that is stuck in C code blocks no other rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.kernel.comms import page_comms
from notebook_launcher.kernel.comms.comm_updates import CommUpdates, supersedes
from notebook_launcher.messaging import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from notebook_launcher.engines.tree import Tree
    from notebook_launcher.kernel.display.sink import Sink

__all__ = ["RankComms"]

MAX_COMMS = 5000
"""Comms that are open at once; beyond it the oldest stay as they are in the page."""
MAX_WAITING = 200
"""Messages of the page that wait for one rank; beyond it the oldest are dropped."""


class _CommHome(NamedTuple):
    """The rank that has a comm, and the kernel's part in it."""

    rank: int
    forget: Callable[[], object]
    """Removes the comm from the kernel's manager."""


class RankComms:
    """The comms of all ranks of one process tree. Thread-safe.

    The thread of the run in progress alone calls `take`, `publish`, `next_due` and `tick`, and so has `_updates` for
    itself; all else that several threads use is read and written under the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._homes: dict[str, _CommHome] = {}
        """By comm, oldest first."""
        self._waiting: dict[int, deque[messages.CommMessage]] = {}
        """By rank: the page's messages that the rank does not have yet."""
        self._handling: set[int] = set()
        """The ranks that have a message and have not answered that they handled it."""
        self._updates = CommUpdates()
        """The ranks' messages on their way to the page."""
        self._wake: Callable[[], object] | None = None
        """Wakes the thread of the run in progress; None between runs."""
        self.serve: Callable[[], Callable[[], object] | None] = lambda: None
        """Returns a function that makes ranks handle waiting messages between runs; None: these wait for a run."""
        self.cell_message: Any = None
        """The message that started the cell in which widgets were made last; None: there were none."""

    @contextlib.contextmanager
    def served(self, wake: Callable[[], object]) -> Iterator[None]:
        """Inside this block, a run's thread passes messages on; `wake` has it look for new ones."""
        with self._lock:
            self._wake = wake
        try:
            yield
        finally:
            with self._lock:
                self._wake = None
                self._handling.clear()
                is_waiting = bool(self._waiting)
            if is_waiting and (serve := self.serve()) is not None:
                page_comms.call_soon(serve)

    def take(self, rank: int, record: messages.CommMessage | messages.CommHandled, sink: Sink) -> None:
        """Take a rank's record; call it in the thread of the run."""
        if isinstance(record, messages.CommHandled):
            with self._lock:
                self._handling.discard(rank)
            return
        if record.kind == "comm_open":
            self.cell_message = sink.message
            self._open(rank, record.comm_id)
        elif not self._is_open(record.comm_id):
            return
        self._updates.add(record, sink)
        if record.kind == "comm_close":
            self._drop([record.comm_id])

    def publish(self, now: float | None) -> None:
        """Send the page the messages that are due, or all of them if `now` is None."""
        if self._updates:
            self._updates.publish(now)

    def next_due(self, now: float) -> float | None:
        """Return the seconds until `tick` has something to send to the page; None: nothing waits."""
        return self._updates.next_due(now)

    def tick(self, now: float, tree: Tree) -> None:
        """Send the page the messages that are due, and each rank the next message that waits for it."""
        self.publish(now)
        self._send_pending(tree)

    def receive(self, message: dict[str, Any]) -> bool:
        """Keep a message of the page for its rank, in any thread; return False if no run would pass it on."""
        with self._lock:
            if self._wake is None or not self._keep(message):
                return False
            self._wake()
        return True

    def receive_idle(self, message: dict[str, Any]) -> None:
        """Keep a message of the page for its rank, and have it handled; in the main thread."""
        if self.receive(message):
            return
        with self._lock:
            kept = self._keep(message)
        if kept and (serve := self.serve()) is not None:
            serve()

    def _send_pending(self, tree: Tree) -> None:
        """Send each rank the next message that waits for it."""
        if not self._waiting:
            return
        with self._lock:
            for rank in [waiter for waiter in self._waiting if waiter not in self._handling]:
                waiting = self._waiting[rank]
                record = waiting.popleft()
                if not waiting:
                    del self._waiting[rank]
                self._handling.add(rank)
                tree.send(rank, record)
                # A rank between calls reads its records; in a call, only the signal has it look.
                tree.signal((rank,), messages.COMM_SIGNAL)

    def take_waiting(self) -> tuple[int, tuple[messages.CommMessage, ...]] | None:
        """Return a rank and all messages that wait for it, which are its from now on; None: nothing waits."""
        with self._lock:
            for rank in list(self._waiting):
                return rank, tuple(self._waiting.pop(rank))
        return None

    def forget(self, rank: int) -> None:
        """Drop the comms of a rank whose process is gone; its widgets stay in the page as they are."""
        with self._lock:
            self._waiting.pop(rank, None)
            self._handling.discard(rank)
            self._drop([comm_id for comm_id, home in self._homes.items() if home.rank == rank])

    def close(self) -> None:
        """Drop all comms; idempotent."""
        with self._lock:
            self._waiting.clear()
            self._handling.clear()
            self._drop(list(self._homes))

    def _open(self, rank: int, comm_id: str) -> None:
        with self._lock:
            if len(self._homes) >= MAX_COMMS:
                self._drop([next(iter(self._homes))])
            forget = page_comms.register_comm(comm_id, self.receive, self.receive_idle)
            self._homes[comm_id] = _CommHome(rank, forget)

    def _is_open(self, comm_id: str) -> bool:
        with self._lock:
            return comm_id in self._homes

    def _drop(self, comm_ids: list[str]) -> None:
        with self._lock:
            for comm_id in comm_ids:
                if (home := self._homes.pop(comm_id, None)) is not None:
                    home.forget()

    def _keep(self, message: dict[str, Any]) -> bool:
        content = message["content"]
        home = self._homes.get(content.get("comm_id"))
        if home is None:
            return False
        record = messages.CommMessage(
            kind=message["header"]["msg_type"],
            comm_id=content["comm_id"],
            data=content.get("data") or {},
            metadata=message.get("metadata") or {},
            buffers=tuple(bytes(buffer) for buffer in message.get("buffers") or ()),
            parent=_plain(message["header"]),
        )
        waiting = self._waiting.setdefault(home.rank, deque(maxlen=MAX_WAITING))
        if waiting and supersedes(record, waiting[-1]):
            waiting.pop()
        waiting.append(record)
        return True


def _plain(header: dict[str, Any]) -> dict[str, Any]:
    """Return what front ends compare of a message's header, as plain values."""
    return {name: str(header[name]) for name in ("msg_id", "msg_type", "session", "username") if name in header}
