"""The `Tree` of a launch on several machines, made of the agents of all nodes.

`ProcessTree` is the `Tree` of one machine, and has the same methods.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import itertools
import os
import queue
import secrets
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.engines.board import Board, LiveRecords, Pulse
from notebook_launcher.engines.cluster import node_records
from notebook_launcher.engines.cluster.connections import in_time_of_kernel
from notebook_launcher.engines.engine import FromRank, NodeLost, RankLost, SupervisorLost, Woken
from notebook_launcher.machine.allocation import ranks_by_node
from notebook_launcher.messaging import board_layout, messages
from notebook_launcher.messaging.channel import anonymous_file
from notebook_launcher.travel.changed_modules import is_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from notebook_launcher.engines.cluster.node import Node
    from notebook_launcher.engines.engine import Event


ANSWER_PATIENCE = 1.0
"""Longest wait in seconds for the nodes' stacks: reading them takes up to half a second."""
AT_ONCE = 256
"""Records of nodes that are taken at once: while many nodes send, there may always be one more."""
CLOSE_PATIENCE = 10.0
"""Longest wait in seconds for a node to kill and reap its ranks; then its agent is given up."""
LOOK_EVERY = 0.1
"""Seconds between two looks whether the deadline of a wait is nearer now."""

_numbers = itertools.count(1)


class ClusterTree:
    """The ranks of several nodes.

    Args:
        setup: The settings of all ranks; `setup.environ` holds what is added to each node's own.
        nodes: The nodes, which have all joined; the first `setup.place.num_nodes` get ranks, the others stay idle.
        give_back: Takes the nodes when the tree is closed.
    """

    def __init__(self, setup: messages.Setup, nodes: Sequence[Node], give_back: Callable[[], None]) -> None:
        self._nodes = tuple(nodes[: setup.place.num_nodes])
        self._give_back = give_back
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Pairs of a node and a record that its thread has read, None if the node is lost; None alone: wake up."""
        self._number = next(_numbers)
        """Number of this tree: records of an earlier tree on the same agents are ignored."""
        first = self._nodes[0]
        self.setup = dataclasses.replace(setup, master_port=first.port)
        """The settings of all ranks, which meet at the first node."""
        self._node_of: dict[int, Node] = {}
        self._ranks_of: dict[Node, tuple[int, ...]] = {}
        self._board_memory = RelayedMemory(self._nodes)
        self.board = Board(self._board_memory)
        self._pids: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        """By rank: bytes of resident memory, as its node last reported."""
        self._pulses: dict[int, Pulse] = {}
        self._exited: set[int] = set()
        self._is_finishing = False
        self._told_lost: set[int] = set()
        self._is_closed = False
        archive: bytes | None = None
        parts = ranks_by_node(setup.num_processes, len(self._nodes))
        for number, (node, ranks) in enumerate(zip(self._nodes, parts, strict=True)):
            node.inbox = self._inbox
            self._node_of.update(dict.fromkeys(ranks, node))
            self._ranks_of[node] = ranks
            place = messages.Place(
                ranks=ranks, node=number, num_nodes=len(self._nodes), store_address=first.address, interface=""
            )
            if not node.has_folder:
                archive = archive_modules() if archive is None else archive
                node.send(node_records.Modules(archive))
            imports = node.imports.news({})  # The environment and the folders are the node's own.
            if imports is not None:
                imports = imports._replace(local={})
            node.send(node_records.StartTree(self._number, dataclasses.replace(self.setup, place=place), imports))
            if node.lost:  # Before it had this inbox.
                self._inbox.put((node, None))

    @property
    def pids(self) -> dict[int, int]:
        """The process number of each rank that lives, on its own machine."""
        return dict(self._pids)

    def send(self, rank: int, record: object) -> None:
        """Send a record to a rank."""
        self._node_of[rank].send(node_records.ToRank(rank, record, has_parcel=False))

    def send_all(self, record: object, fds: Sequence[int] = ()) -> None:
        """Send a record to every rank, with a parcel that goes to each node once."""
        for node in self._nodes:
            for fd in fds:
                node.send_parcel(fd)
            for rank in self._ranks_of[node]:
                node.send(node_records.ToRank(rank, record, has_parcel=bool(fds)))

    def finish(self) -> None:
        """Have every rank that is idle exit; a node whose ranks have all exited needs no further request to close."""
        self._is_finishing = True
        for node in self._nodes:
            node.send(node_records.FinishTree())

    def signal(self, ranks: tuple[int, ...], signum: int) -> None:
        """Send a signal to ranks; SIGKILL also goes to their data-loader workers."""
        wanted = set(ranks)
        for node in self._nodes:
            if here := tuple(wanted.intersection(self._ranks_of[node])):
                node.send(node_records.Signal(here, int(signum)), urgent=True)

    def replace(self, rank: int) -> None:
        """Start a rank again after its process has exited."""
        self._exited.discard(rank)
        self._node_of[rank].send(node_records.Replace(rank))

    def kill_supervisor(self) -> None:
        """Kill the supervisors of all nodes; their ranks die with them."""
        for node in self._nodes:
            node.send(node_records.KillSupervisor(), urgent=True)

    def wake(self) -> None:
        """Make `events` return; from any thread."""
        self._inbox.put(None)

    def events(self, timeout: float | None) -> list[Event]:
        """Wait up to `timeout` seconds for events and return them, each rank's in the order in which it caused them."""
        happened: list[Event] = []
        with contextlib.suppress(queue.Empty):
            for number in range(AT_ONCE):
                wait = not number and timeout != 0
                item = self._inbox.get(timeout=timeout) if wait else self._inbox.get_nowait()
                happened += [Woken()] if item is None else self._unpack(*item)
        return happened

    @property
    def is_dying(self) -> bool:
        """False: an agent reports the end of a rank and its exit together."""
        return False

    def drain(self, rank: int) -> list[Event]:
        """Return nothing: an agent sends the output of a rank before the record that came after it."""
        del rank
        return []

    def _unpack(self, node: Node, record: node_records.Happened | node_records.BoardWritten | None) -> list[Event]:
        if record is None:
            return self._lose(node)
        if record.tree != self._number:
            return []
        if isinstance(record, node_records.BoardWritten):
            self._board_memory.note_written(node.number, record.number)
            return []
        if record.state is not None:
            self._note_state(node, record.state)
        return [
            LiveRecords(event, node.offset) if isinstance(event, bytes) else self._translate(event, node)
            for event in record.events
        ]

    def _translate(self, event: Any, node: Node) -> Event:
        match event:
            case node_records.Carried(rank, payload, blobs):
                return FromRank(rank, in_time_of_kernel(payload, node.offset), [_file_of(blob) for blob in blobs])
            case FromRank(rank, payload, _):
                return FromRank(rank, in_time_of_kernel(payload, node.offset), [])
            case messages.RankStarted(rank=rank, pid=pid):
                self._pids[rank] = pid
            case RankLost(exited):
                self._forget(exited.rank)
                self._exited.add(exited.rank)
                return RankLost(in_time_of_kernel(exited, node.offset))
            case SupervisorLost(reason):
                return SupervisorLost(f"{node}: {reason or 'its process ended'}")
        return event  # type: ignore[no-any-return]

    def _note_state(self, node: Node, state: node_records.NodeState) -> None:
        ranks = self._ranks_of[node]
        self._board_memory.merge(state, ranks)
        for rank in ranks:
            self._memory.pop(rank, None)
            self._pulses.pop(rank, None)
        self._memory.update(state.memory)
        self._pulses.update(state.pulses)

    def _forget(self, rank: int) -> None:
        self._pids.pop(rank, None)
        self._memory.pop(rank, None)
        self._pulses.pop(rank, None)

    def _lose(self, node: Node) -> list[Event]:
        if node.number in self._told_lost:
            return []
        self._told_lost.add(node.number)
        ranks = self._ranks_of[node]
        for rank in ranks:
            self._forget(rank)
        return [NodeLost(str(node), ranks, "\n".join(filter(None, (node.lost, node.connection.last_words()))))]

    @property
    def stacks(self) -> NodeStacks:
        """The stacks of the ranks, which the agents read."""
        return NodeStacks(self._ask_stacks)  # Kept, it would make a cycle for the garbage collector.

    def _ask_stacks(self, method: Any, *args: Any) -> dict[int, Any]:
        """Call a method of the stacks of each node's tree, and return what they answer in time, joined."""
        asked = {node: next(_numbers) for node in self._nodes if not node.lost}
        for node, number in asked.items():
            node.send(node_records.AskStacks(number, method, args), urgent=True)
        found: dict[int, Any] = {}
        until = time.monotonic() + ANSWER_PATIENCE
        for node, number in asked.items():
            answer = node.reply(functools.partial(_answers, number), until)
            found |= (answer.value or {}) if answer is not None else {}
        return found

    def memory(self, rank: int) -> int | None:
        """Return the resident memory of a rank in bytes, as its node last reported; None if unknown."""
        return self._memory.get(rank)

    def pulses(self, ranks: Iterable[int]) -> dict[int, Pulse]:
        """Return the activity of these ranks' processes, as their nodes last reported."""
        return {rank: self._pulses[rank] for rank in ranks if rank in self._pulses}

    def close(self, deadline: Callable[[], float] | None = None) -> None:
        """Kill the remaining processes, wait until they are reaped, and give the nodes back, as `ProcessTree.close`."""
        if self._is_closed:
            return
        for node in self._nodes:
            if not (self._is_finishing and self._exited.issuperset(self._ranks_of[node])):
                node.send(node_records.CloseTree(), urgent=True)
        usual = time.monotonic() + CLOSE_PATIENCE
        for node in self._nodes:
            while not (is_closed := node.await_closed(self._number, time.monotonic() + LOOK_EVERY)) and not node.lost:
                if time.monotonic() >= (usual if deadline is None else min(usual, deadline())):
                    break
            if not is_closed and not node.lost:
                node.lost = "it did not end its ranks in time"
        self._is_closed = True
        self._give_back()


def _answers(number: int, record: Any) -> bool:
    return isinstance(record, node_records.StacksAnswered) and record.number == number


def _file_of(blob: bytes) -> int:
    fd = anonymous_file("value")
    with open(fd, "wb", closefd=False) as file:
        file.write(blob)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


# --------------------------------------------------------------------------------------------------------------------
# The stacks of ranks on several nodes, read by their agents.


class NodeStacks:
    """The stacks of a cluster tree's ranks, with the methods of `StackFiles`, which each node calls for its ranks.

    Args:
        ask: Calls a method of the `StackFiles` of each node, and returns the answers, joined.
    """

    def __init__(self, ask: Callable[..., dict[int, Any]]) -> None:
        self._ask = ask

    def dump(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the stacks of all threads of these ranks, or of every live rank."""
        return self._ask("dump", None if ranks is None else list(ranks))

    def sizes(self) -> dict[int, int]:
        """Return the number of bytes that each rank that is up has written into its file."""
        return self._ask("sizes")

    def request(self) -> None:
        """Have every rank that is up write its stacks; this waits for the request's arrival."""
        self._ask("request")

    def read(self, starts: Mapping[int, int]) -> dict[int, str]:
        """Return what ranks have written into their files after these positions."""
        return self._ask("read", dict(starts))


# --------------------------------------------------------------------------------------------------------------------
# The board's memory where every node has its own: what is written goes to all, what is read comes from all.
#
# A request goes to the node of rank 0 last, when all other nodes have confirmed that they have it. So once rank 0
# sees the request and names an update for it, every rank that looks sees it too (`training/requests.py`).


class RelayedMemory:
    """The board's memory in a tree of several nodes, as the kernel writes and reads it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._memory = bytearray(board_layout.BOARD_SIZE)
        self._epoch = 0
        self._numbers = itertools.count(1)
        self._held: collections.deque[_HeldWrite] = collections.deque()
        """Requests that the first node does not have yet, the oldest first."""

    def __getitem__(self, at: Any) -> Any:
        return self._memory[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._memory[at] = value
        if isinstance(at, slice):
            self._epoch += 1
            self._held.clear()
            for node in self._nodes:
                node.send(node_records.BoardWrite(at.start or 0, bytes(value), self._epoch))
            return
        write = node_records.BoardWrite(at, bytes([value]), self._epoch, next(self._numbers))
        others = [node for node in self._nodes[1:] if not node.lost]
        self._held.append(_HeldWrite(write, {node.number for node in others}))
        for node in others:
            node.send(write)
        self._send_held()

    def note_written(self, node: int, number: int) -> None:
        """Note that a node has what was written; `number` as in `BoardWrite`."""
        for held in self._held:
            if held.write.number == number:
                held.missing.discard(node)
        self._send_held()

    def _send_held(self) -> None:
        while self._held and not self._held[0].missing:
            self._nodes[0].send(self._held.popleft().write._replace(number=0))

    def merge(self, state: node_records.NodeState, ranks: Sequence[int]) -> None:
        """Take over what ranks of one node have written, unless the board was cleared since."""
        if state.epoch != self._epoch:
            return
        self._memory[board_layout.HAS_SAFEPOINT] |= state.has_safepoint
        for first, values in ((board_layout.COOPERATIVE, state.cooperative), (board_layout.ACTIVITY, state.activities)):
            self._memory[first + ranks[0] : first + ranks[0] + len(values)] = values


@dataclasses.dataclass(slots=True)
class _HeldWrite:
    """A request on its way."""

    write: node_records.BoardWrite
    missing: set[int]


# --------------------------------------------------------------------------------------------------------------------
# The user's own modules for nodes that lack the kernel's folder: their sources, in an archive that is imported from.
#
# A node keeps the archive in memory, so nothing of it is left there, whatever ends the node's processes. Ranks import
# the modules by name as on one machine, so values of their classes travel back as they are.


def archive_modules() -> bytes:
    """Return a zip archive of all modules that this process has imported and that are not installed; empty: none."""
    files: dict[str, Path] = {}
    for name, module in sorted(sys.modules.items()):
        if is_local(module) and name == module.__name__ and name.partition(".")[0] != "notebook_launcher":
            path = Path(str(module.__file__))
            inside = name.replace(".", "/")
            files[f"{inside}/__init__.py" if path.name == "__init__.py" else f"{inside}.py"] = path
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for inside, path in files.items():
            if path.is_file():
                file.write(path, inside)
    return archive.getvalue() if files else b""


def path_of_archive(fd: int) -> str:
    """Return an entry for `sys.path` by which children of this process import from an archive in a file of memory."""
    return f"/proc/{os.getpid()}/fd/{fd}"


# --------------------------------------------------------------------------------------------------------------------
# Test of a node for the kernel's folder: the kernel puts a mark into it for a moment, and the node looks for that.
#
# A path that exists on both sides proves little: every machine has a home folder of that name.


@contextlib.contextmanager
def mark(folder: Path) -> Iterator[str | None]:
    """Yield the path of an empty file in a folder, which is gone afterwards; None if none can be made there."""
    path = folder / f".notebook-launcher-{secrets.token_hex(8)}"
    try:
        path.touch(exist_ok=False)
    except OSError:
        yield None
        return
    try:
        yield os.fspath(path)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
