"""Agents of a cluster that does not exist, all in one process: they speak as agents do, and their ranks are made up.

    python swarm.py FD FD ...

Each two descriptors are one agent's link: where it reads, and where it writes. A rank makes four updates a second. It
reports a loss, its progress and the time of its phases with each, prints a line every five seconds, and every ten
seconds fifty lines at once. All make an update within 50 ms; one rank in a hundred is a straggler, the last of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import os
import pickle
import selectors
import signal
import sys
import time
from typing import Any

from notebook_launcher import context
from notebook_launcher.engines.board import Pulse
from notebook_launcher.engines.cluster import node_records
from notebook_launcher.engines.cluster.connections import Greeting, Network
from notebook_launcher.engines.cluster.node_records import HeldEvents
from notebook_launcher.engines.engine import FromRank, Output, RankLost
from notebook_launcher.messaging import messages
from notebook_launcher.messaging.links import HEAD

UPDATE_EVERY = 0.25
STATE_EVERY = 0.25
BEAT_EVERY = 1.0
LATE = 0.05
"""Seconds by which a straggler is late, and over which the others spread."""
LINE_EVERY, BURST_EVERY, BURST = 20, 40, 50
"""Updates between two lines, and between two bursts; lines of a burst."""
TOTAL = 100_000
DYING = "RANK_THAT_DIES"
"""In the environment of a launch: the rank that is killed after its second update."""
STACK = """Thread 0x00007f0000000000 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/me/train.py", line {line} in train
"""


class Agent:
    """One agent of the swarm."""

    def __init__(self, swarm: Swarm, number: int, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self._swarm = swarm
        self._number = number
        self._write_fd = write_fd
        self._unread = bytearray()
        self._tree = 0
        self._ranks: tuple[int, ...] = ()
        self._call_id = 0
        self._updates: dict[int, int] = {}
        """By rank that runs: the updates that it has made."""
        self._alive: set[int] = set()
        self._held = HeldEvents()
        self._dying = -1
        os.set_blocking(read_fd, False)
        network = Network("eth0", f"10.0.{number // 250}.{1 + number % 250}", 16)
        greeting = Greeting.of_this_machine()
        greeting = dataclasses.replace(
            greeting, host=f"sim{number}", namespace=f"sim{number}", networks=(network,), num_cores=8, gpus=()
        )
        os.write(write_fd, greeting.to_line())
        self._later(BEAT_EVERY, self._beat)

    def _later(self, seconds: float, do: Any, *args: Any) -> None:
        self._swarm.at(time.monotonic() + seconds, do, *args)

    def _send(self, record: object) -> None:
        payload = pickle.dumps(record, protocol=5)
        view = memoryview(HEAD.pack(len(payload)) + payload)
        while view:
            view = view[os.write(self._write_fd, view) :]

    def read(self) -> bool:
        """Obey what has arrived; return False at the end of the link."""
        data = os.read(self.read_fd, 1 << 20)
        self._unread += data
        while len(self._unread) >= HEAD.size:
            (size,) = HEAD.unpack_from(self._unread)
            if len(self._unread) < HEAD.size + size:
                break
            record = pickle.loads(memoryview(self._unread)[HEAD.size : HEAD.size + size])
            del self._unread[: HEAD.size + size]
            self._obey(record)
        return bool(data)

    def _obey(self, record: Any) -> None:
        match record:
            case node_records.Join():
                self._send(node_records.Joined(29500))
            case node_records.LookForFile(path):
                self._send(node_records.FileSeen(path, is_there=True))
            case node_records.Ping(sent):
                self._send(node_records.Pong(sent, time.monotonic()))
            case node_records.StartTree(tree, setup):
                self._start(tree, setup)
            case node_records.FinishTree():
                for rank in sorted(self._alive):
                    self._exit(rank, 0)
                self._close()
            case node_records.CloseTree():
                self._close()
            case _:
                self._obey_for_tree(record)

    def _obey_for_tree(self, record: Any) -> None:
        match record:
            case node_records.ToRank(rank, messages.RunCall() as call):
                self._begin(rank, call.call_id)
            case node_records.Signal(ranks, signum):
                for rank in ranks:
                    self._signal(rank, signum)
            case node_records.BoardWrite(number=number) if number:
                self._send(node_records.BoardWritten(self._tree, number))
            case node_records.AskStacks(number, method, args):
                self._send(node_records.StacksAnswered(number, self._answer(method, *args)))

    def _close(self) -> None:
        self._send(node_records.TreeClosed(self._tree, 29500))
        self._held.take()
        self._tree, self._alive, self._updates = 0, set(), {}

    def _start(self, tree: int, setup: messages.Setup) -> None:
        self._tree, self._ranks, self._dying = tree, setup.place.ranks, int(setup.environ.get(DYING, -1))
        self._alive = set(self._ranks)
        self._held = HeldEvents()
        self._tell(*(messages.RankStarted(rank=rank, pid=1000 + rank) for rank in self._ranks))
        self._later(STATE_EVERY, self._tell_state, tree)

    def _answer(self, method: str, ranks: Any = None) -> Any:
        if method == "dump":
            wanted = self._alive if ranks is None else self._alive & set(ranks)
            return {rank: STACK.format(line=10 if rank else 12) for rank in wanted}
        return {}

    def _tell(self, *events: Any) -> None:
        now = time.monotonic()
        is_first = self._held.next_due(now) == float("inf")
        self._held.add(events, now)
        wait = self._held.next_due(now)
        if not wait:
            self._flush()
        elif is_first:
            self._later(wait, self._flush_if_due)

    def _flush_if_due(self) -> None:
        # The events for which this was set may have gone with a state, and others wait now.
        if not self._held.next_due(time.monotonic()):
            self._flush()

    def _flush(self) -> None:
        if (events := self._held.take()) and self._tree:
            self._send(node_records.Happened(self._tree, events))

    def _tell_state(self, tree: int) -> None:
        if tree != self._tree:
            return
        pulses = {rank: Pulse(False, self._updates.get(rank, 0) * 30, 100) for rank in self._alive}
        memory = dict.fromkeys(self._alive, 3 << 30)
        activities = bytes([context.COMPUTING] * len(self._ranks))
        state = node_records.NodeState(1, False, activities, activities, memory, pulses)
        self._send(node_records.Happened(tree, self._held.take(), state))
        self._later(STATE_EVERY, self._tell_state, tree)

    def _beat(self) -> None:
        self._send(node_records.Beat())
        self._later(BEAT_EVERY, self._beat)

    def _begin(self, rank: int, call_id: int) -> None:
        self._call_id, self._updates[rank] = call_id, 0
        self._tell(FromRank(rank, messages.CallStarted(call_id=call_id), []))
        now = time.monotonic()
        jitter = LATE if rank % 100 == 99 else LATE * (rank % 97) / 97
        due = (now // UPDATE_EVERY + 4) * UPDATE_EVERY + jitter
        self._swarm.at(due, self._update, rank, self._tree, due)

    def _update(self, rank: int, tree: int, due: float) -> None:
        if tree != self._tree or rank not in self._updates:
            return
        number = self._updates[rank] = self._updates[rank] + 1
        if rank == self._dying and number == 2:
            self._updates.pop(rank)
            self._exit(rank, -signal.SIGKILL)
            return
        now = time.monotonic()
        # As of ranks that are woken one by one: every record is an event, and those of an update come together.
        self._tell(*(FromRank(rank, record, []) for record in _records(rank, number, now)), *_output(rank, number))
        self._swarm.at(due + UPDATE_EVERY, self._update, rank, tree, due + UPDATE_EVERY)

    def _signal(self, rank: int, signum: int) -> None:
        if signum == signal.SIGKILL:
            self._exit(rank, -signum)
        elif self._updates.pop(rank, None) is not None:
            report = messages.ExceptionReport(type_name="KeyboardInterrupt", message="", frames=())
            group = messages.GroupState(is_kept=True, num_calls={})
            raised = messages.Raised(
                call_id=self._call_id,
                time=time.monotonic(),
                peak_rss=3 << 30,
                stage="function",
                report=report,
                group=group,
            )
            self._tell(FromRank(rank, raised, []))

    def _exit(self, rank: int, code: int) -> None:
        if rank in self._alive:
            self._alive.discard(rank)
            exited = messages.RankExited(
                rank=rank, pid=1000 + rank, exitcode=int(code), time=time.monotonic(), peak_rss=3 << 30, oom=False
            )
            self._tell(RankLost(exited))


def _records(rank: int, number: int, now: float) -> list[Any]:
    loss = 1.0 / number + rank * 1e-4
    start, spans = now - UPDATE_EVERY, []
    for phase, seconds in zip(
        ("data", "forward", "backward", "sync", "step"), (0.01, 0.08, 0.1, 0.05, 0.01), strict=True
    ):
        spans.append((phase, start, seconds))
        start += seconds
    return [
        messages.Metrics(time=now, step=number, values={"loss": loss, "accuracy": 1 - loss}),
        messages.Progress(time=now, done=number, total=TOTAL, description="train", loops=1, items=number),
        messages.Phases(
            time=now, windows=1, micro_batches=1, samples=8000.0, fullest=(1, 8000.0), num_fullest=1,
            seconds={phase: seconds for phase, _, seconds in spans},
            counts={phase: 1 for phase, *_ in spans}, spans=tuple(spans),
        ),
    ]  # fmt: skip


def _output(rank: int, number: int) -> list[Any]:
    if (number + rank) % BURST_EVERY == 0:
        text = "".join(f"step {number}: warning {line} of a library\n" for line in range(BURST))
        return [Output(rank, "stderr", text.encode())]
    if number % LINE_EVERY == 0:
        return [Output(rank, "stdout", f"step {number}\n".encode())]
    return []


class Swarm:
    """All agents, and the times at which they have something to do."""

    def __init__(self, fds: list[int]) -> None:
        self._due: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        for number in range(len(fds) // 2):
            agent = Agent(self, number, fds[2 * number], fds[2 * number + 1])
            self._selector.register(agent.read_fd, selectors.EVENT_READ, agent)

    def at(self, due: float, do: Any, *args: Any) -> None:
        """Do something at a time."""
        heapq.heappush(self._due, (due, next(self._numbers), do, args))

    def serve(self) -> None:
        """Serve the kernel until it is gone."""
        while True:
            timeout = max(0.0, self._due[0][0] - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if not key.data.read():
                    return
            until = time.monotonic()
            while self._due[0][0] <= until:
                _, _, do, args = heapq.heappop(self._due)
                do(*args)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        Swarm([int(word) for word in sys.argv[1:]]).serve()
