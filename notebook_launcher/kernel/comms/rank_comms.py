"""Comms of the ranks' widgets, between the page and the ranks, for as long as the ranks live.

A rank's messages go to the cell in which the rank runs. The page's messages come in the thread that reads the kernel's
shell channel while a cell is busy (`kernel/comms/tap.py`), otherwise in the main thread. They wait here for the
rank: at most one is on its way to a rank, so that a rank that is stuck in C code blocks no other rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from notebook_launcher.errors import ConfigError
from notebook_launcher.ipython_shell import kernel_shell
from notebook_launcher.kernel.comms.tap import open_tap
from notebook_launcher.messaging import messages
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.engines.engine import Tree
    from notebook_launcher.kernel.display.sink import Sink
    from notebook_launcher.messaging.messages import CommMessage


MAX_COMMS = 5000
"""Comms that are open at once; beyond it the oldest stay as they are in the page."""
MAX_WAITING = 200
"""Messages of the page that wait for one rank; beyond it the oldest are dropped."""
COMPARED = ("msg_id", "msg_type", "session", "username")
"""What front ends compare of a message's header."""


class _CommHome(NamedTuple):
    """The rank that has a comm, and the kernel's part in it."""

    rank: int
    forget: Callable[[], object]
    """Removes the comm from the kernel's manager."""


class RankComms:
    """The comms of all ranks of one process tree. Thread-safe.

    The thread of the run in progress alone calls `take` and `tick`, and uses `updates`; all else that several threads
    use is read and written under the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._homes: dict[str, _CommHome] = {}
        """By comm, oldest first."""
        self._waiting: dict[int, deque[messages.CommMessage]] = {}
        """By rank: the page's messages that the rank does not have yet."""
        self._handling: set[int] = set()
        """The ranks that have a message and have not answered that they handled it."""
        self.updates = CommUpdates()
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
                loop = getattr(kernel_shell().kernel, "io_loop", None)
                if loop is not None:
                    loop.add_callback(serve)  # In the main thread, once no cell runs.

    def take(self, rank: int, record: messages.CommMessage | messages.CommHandled, sink: Sink) -> None:
        """Take a rank's record; call it in the thread of the run."""
        if isinstance(record, messages.CommHandled):
            with self._lock:
                self._handling.discard(rank)
            return
        if record.kind == "comm_open":
            self.cell_message = sink.message
            self._open(rank, record.comm_id)
        elif record.comm_id not in self._homes:
            return
        self.updates.add(record, sink)
        if record.kind == "comm_close":
            self._drop([record.comm_id])

    def tick(self, now: float, tree: Tree) -> None:
        """Send the page the messages that are due, and each rank the next message that waits for it."""
        self.updates.publish(now)
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
            manager = kernel_shell().kernel.comm_manager
            manager.register_comm(_relayed(comm_id, self.receive_idle))
            tap = open_tap(comm_id, whole=self.receive)

            def forget() -> None:
                manager.comms.pop(comm_id, None)
                if tap is not None:
                    tap.close(comm_id)

            self._homes[comm_id] = _CommHome(rank, forget)

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
        header = message["header"]
        record = messages.CommMessage(
            kind=header["msg_type"],
            comm_id=content["comm_id"],
            data=content.get("data") or {},
            metadata=message.get("metadata") or {},
            buffers=tuple(bytes(buffer) for buffer in message.get("buffers") or ()),
            parent={name: str(header[name]) for name in COMPARED if name in header},
        )
        waiting = self._waiting.setdefault(home.rank, deque(maxlen=MAX_WAITING))
        if waiting and supersedes(record, waiting[-1]):
            waiting.pop()
        waiting.append(record)
        return True


# --------------------------------------------------------------------------------------------------------------------
# Updates of ranks to their widgets in the page: limited in rate, and of several updates only the last.


TICK = 0.05
"""Seconds between two batches: the eye sees no more, and Jupyter's server drops what comes above 1000 messages/s."""
MAX_WAITING_UPDATES = 1000
"""Messages that wait for the next batch; more than these go at once, so that nothing is lost."""


def supersedes(new: CommMessage, old: CommMessage) -> bool:
    """Return True if a message changes all that an earlier message to the same widget changes."""
    return new.comm_id == old.comm_id and bool(_names(old)) and _names(new) >= _names(old)


def _names(record: CommMessage) -> frozenset[str]:
    """Return the names of what an update changes; nothing for other messages."""
    if record.kind != "comm_msg" or record.data.get("method") != "update":
        return frozenset()
    return frozenset(record.data.get("state", ())) | {str(path[0]) for path in record.data.get("buffer_paths", ())}


class CommUpdates:
    """The ranks' messages that wait for the next batch; used in the run's thread alone."""

    def __init__(self) -> None:
        self._waiting: list[tuple[CommMessage, Sink]] = []
        self._last = float("-inf")
        """Time of the last batch."""

    def add(self, record: CommMessage, sink: Sink) -> None:
        """Add a message; an update takes the place of earlier ones to its widget, but not past other messages to it."""
        if record.parent is None and _names(record):
            for at in range(len(self._waiting) - 1, -1, -1):
                earlier = self._waiting[at][0]
                if earlier.comm_id == record.comm_id:
                    if earlier.parent is None and (merged := _merged(earlier, record)) is not None:
                        del self._waiting[at]
                        record = merged
                    break
        self._waiting.append((record, sink))
        if len(self._waiting) >= MAX_WAITING_UPDATES:
            self.publish(None)

    def next_due(self, now: float) -> float | None:
        """Return the seconds until the next batch; None: nothing waits."""
        return max(0.0, self._last + TICK - now) if self._waiting else None

    def publish(self, now: float | None) -> None:
        """Send the waiting messages, if a batch is due or `now` is None."""
        if not self._waiting or (now is not None and self.next_due(now) != 0):
            return
        waiting, self._waiting = self._waiting, []
        self._last = time.monotonic() if now is None else now
        for record, sink in waiting:
            sink.comm(record)


def _merged(earlier: CommMessage, record: CommMessage) -> CommMessage | None:
    """Return one update for two; None if they cannot be merged."""
    if supersedes(record, earlier):
        return record
    if not _names(earlier) or earlier.buffers or record.buffers:
        return None
    state = {**earlier.data["state"], **record.data["state"]}
    return dataclasses.replace(record, data={**record.data, "state": state})


# --------------------------------------------------------------------------------------------------------------------
# The kernel's end of a comm that a rank's widget has with the page.


def _relayed(comm_id: str, receive: Callable[[dict[str, Any]], object]) -> Any:
    from comm.base_comm import BaseComm

    class RelayedComm(BaseComm):
        """A comm that the kernel's manager knows, and whose messages come from a rank."""

        def publish_msg(self, *_: Any, **__: Any) -> None:
            """Send nothing: the rank does."""

        def handle_msg(self, msg: dict[str, Any]) -> None:
            """Take a message of the page."""
            receive(msg)

        handle_close = handle_msg

        def __del__(self) -> None:
            """Close nothing."""

    return RelayedComm(comm_id=comm_id, target_name="jupyter.widget", primary=False)


# --------------------------------------------------------------------------------------------------------------------
# Tables and figures of the ranks of a cell: of one rank as they come, or of all ranks in tabs at the end.


def shown_rank(display: int | str | None, running: Sequence[int], config: LaunchConfig) -> int | Literal["all"] | None:
    """Return the rank whose tables and figures are shown, `"all"`, or None for no rank.

    `display` is the choice for this cell; None: the session's, which is the first rank unless `config` names another.
    Raises `ConfigError` for a choice that is not a rank that runs the cell.
    """
    if display is None:
        return {"all": "all", "none": None}.get(config.display, running[0])
    if display == "all":
        return "all"
    if not str(display).isdigit() or int(display) not in running:
        raise ConfigError(
            f"display={display!r} names no rank that runs the cell: {rank_list(running)}. Write a rank, or 'all'."
        )
    return int(display)


class RankPanels:
    """Takes the rich output of a cell's ranks: the shown rank's goes to the cell, all ranks' is kept, or none's is."""

    def __init__(self, shown: int | Literal["all"] | None) -> None:
        self._shown = shown
        self._bundles: defaultdict[int, list[messages.Display]] = defaultdict(list)

    def take(self, rank: int, record: messages.Display | messages.ClearOutput) -> bool:
        """Take a rank's record; return False if the cell is to show it now."""
        if self._shown != "all":
            return rank != self._shown
        bundles = self._bundles[rank]
        if isinstance(record, messages.ClearOutput):
            bundles.clear()
        elif record.update:
            shown = record.transient.get("display_id")
            bundles[:] = [record if bundle.transient.get("display_id") == shown else bundle for bundle in bundles]
        else:
            bundles.append(record)
        return True

    @property
    def widget_ranks(self) -> tuple[int, ...]:
        """The rank whose widgets the cell shows; none in tabs, which hold pictures and text."""
        return (self._shown,) if isinstance(self._shown, int) else ()

    def of(self, rank: int) -> list[Mapping[str, Any]]:
        """Return what a rank has shown, as bundles by MIME type."""
        return [record.data for record in self._bundles.get(rank, ())]
