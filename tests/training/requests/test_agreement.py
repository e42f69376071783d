"""Ranks agree on the update of a save or a stop, however their programs and devices take turns.

The ranks are threads that run one at a time, in an order that hypothesis draws. What they run is the package's own
code; only the reductions are a model: one completes when every rank has begun it, and a device completes one after
another.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import strategies as st

from notebook_launcher import LaunchConfig
from notebook_launcher.context import RankContext, RunStopped
from notebook_launcher.messaging import board_layout
from notebook_launcher.training.requests import Safepoint, Steering, UpdateFence

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_UPDATES = 14
SETTINGS = LaunchConfig().training_settings()
SAVE, STOP = "save", "stop"
Acts = list[tuple[int, str]]
"""Acts of a rank, each with the update that it came after."""


class Ended(BaseException):
    """Raised in a rank whose schedule was given up."""


class Rank(threading.Thread):
    """One rank: reduces, counts, saves and stops as a training loop does, and yields wherever another may run."""

    def __init__(self, number: int, world: World) -> None:
        super().__init__(daemon=True)
        self.number, self.world = number, world
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.begun = 0
        """Reductions that the program has begun."""
        self.done = 0
        """Reductions that the device has completed."""
        self.num_saved = 0
        self.acts: Acts = []
        rendezvous: Any = SimpleNamespace(store=world)
        context = RankContext(
            rank=number, num_processes=len(world.fences), pid=world.pid, settings=SETTINGS,
            send=lambda _: None, board=world.boards[number], rendezvous=rendezvous,
            num_nodes=world.num_nodes,
        )  # fmt: skip
        self.safepoint = Safepoint(context, world.fences[number](self))
        self.steering = Steering(None, None, None)  # type: ignore[arg-type] # Nothing changes here.
        self.safepoint.connect(self.steering, self.save_state)

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run until this rank gets its turn, which it does only when it is ready."""
        self.ready = ready
        self.world.scheduler.release()
        self.turn.acquire()
        if self.world.given_up:
            raise Ended

    def run(self) -> None:
        try:
            self.turn.acquire()
            for update in range(1, NUM_UPDATES + 1):
                self.begun = update
                if not self.world.is_late:
                    self.done = update
                    self.pause(functools.partial(self.world.have_begun, update))
                self.pause()
                self.safepoint.count(updated=True)
                self.pause()
                if self.safepoint.is_due:
                    self.safepoint.act()
        except RunStopped:
            self.acts.append((self.begun, STOP))
        except Ended:
            pass
        self.ready = lambda: False
        self.world.scheduler.release()

    def save_state(self, _update: int) -> str:
        """Save, which all ranks must do together."""
        self.acts.append((self.begun, SAVE))
        self.num_saved += 1
        number = self.num_saved
        self.pause(lambda: all(rank.num_saved >= number for rank in self.world.ranks))
        return ""

    def record(self) -> Any:
        """Return the end of what is queued on the device now, as an event that was recorded would be."""
        until = self.begun
        return SimpleNamespace(synchronize=lambda: self.pause(lambda: self.done >= until))

    def complete(self) -> bool:
        """Have the device complete its next reduction; False: it cannot."""
        able = self.done < self.begun and all(rank.begun > self.done for rank in self.world.ranks)
        self.done += able
        return able


class World:
    """Ranks, their devices and a kernel that asks; `choose` picks who acts next."""

    def __init__(self, fences: list[Callable[[Rank], UpdateFence]], *, is_late: bool, num_nodes: int = 1) -> None:
        """Begin before the first update; with several nodes, each rank has a node and a board of its own."""
        self.pid = os.getpid()
        self.num_nodes = num_nodes
        boards = [bytearray(board_layout.BOARD_SIZE) for _ in range(num_nodes)]
        self.boards = boards if num_nodes > 1 else boards * len(fences)
        self.on_its_way: list[Callable[[], None]] = []
        """Requests that have not arrived on a board yet, in the order of their arrival."""
        self.stored: dict[str, int] = {}
        self.fences, self.is_late = fences, is_late
        self.scheduler = threading.Semaphore(0)
        self.given_up = False
        self.ranks: list[Rank] = []
        self.ranks = [Rank(number, self) for number in range(len(fences))]

    def have_begun(self, update: int) -> bool:
        return all(rank.begun >= update for rank in self.ranks)

    def add(self, key: str, number: int) -> int:
        """Add as the store does."""
        self.stored[key] = self.stored.get(key, 0) + number
        return self.stored[key]

    def ask(self, request: str) -> None:
        arrivals = [functools.partial(write, board, request) for board in self.boards[: self.num_nodes]]
        self.on_its_way += reversed(arrivals)  # Rank 0 sees a request last.
        if self.num_nodes == 1:
            self.on_its_way.pop()()

    def play(self, requests: Acts, choose: Callable[[list[Rank]], Rank]) -> list[Acts]:
        """Let actors take turns until all ranks have ended; return what each did after which update."""
        for rank in self.ranks:
            rank.start()
        turns = 0
        while True:
            while requests and requests[0][0] <= turns:
                self.ask(requests.pop(0)[1])
            if self.on_its_way and turns % 5 == 0:
                self.on_its_way.pop(0)()
            ready = [rank for rank in self.ranks if rank.ready()]
            able = [rank for rank in self.ranks if self.is_late and rank.done < rank.begun]
            if not ready and not any(rank.complete() for rank in able):
                break
            if ready:
                chosen = choose(ready)
                chosen.turn.release()
                self.scheduler.acquire()
                if able and turns % 3 == 0:
                    choose(able).complete()
            turns += 1
        self.given_up = True
        for rank in self.ranks:
            rank.turn.release()
            rank.join()
        return [rank.acts for rank in self.ranks]


def write(board: bytearray, request: str) -> None:
    if request == SAVE:
        board[board_layout.SAVES_ASKED] = (board[board_layout.SAVES_ASKED] + 1) % 256
    else:
        board[board_layout.STOP_FLAG] = board_layout.STOP_TOGETHER


def fenced(rank: Rank) -> UpdateFence:
    return UpdateFence(rank.record)


def unfenced(_: Rank) -> UpdateFence:
    return UpdateFence(None)


requests = st.lists(st.tuples(st.integers(0, 120), st.sampled_from([SAVE, SAVE, STOP])), max_size=5).map(sorted)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    num=st.integers(1, 4),
    is_late=st.booleans(),
    has_nodes=st.booleans(),
    requests=requests,
    order=st.integers(0, 2**32),
)
def test_ranks_save_and_stop_after_the_same_update(
    *, num: int, is_late: bool, has_nodes: bool, requests: Acts, order: int
) -> None:
    drawn = random.Random(order)
    favourite = drawn.randrange(num)  # One rank runs ahead whenever it can.

    def choose(ready: list[Rank]) -> Rank:
        ahead = [rank for rank in ready if rank.number == favourite]
        return ahead[0] if ahead and drawn.random() < 0.7 else drawn.choice(ready)

    fences: list[Callable[[Rank], UpdateFence]] = [fenced if is_late and num > 1 else unfenced] * num
    world = World(fences, is_late=is_late, num_nodes=num if has_nodes else 1)
    acts = world.play(list(requests), choose)
    assert acts == [acts[0]] * num
    ends = {rank.begun for rank in world.ranks}
    assert len(ends) == 1, "a rank was left in a reduction or a save that others never entered"
    if any(at == 0 for at, _ in requests):
        assert acts[0], "a request that was there from the beginning was never answered"


def test_fence_waits_for_nothing_while_a_graph_is_captured() -> None:
    waits: list[str] = []
    marks = [SimpleNamespace(synchronize=functools.partial(waits.append, name)) for name in ("first", "second")]
    queue: list[Any] = [marks[0], None, marks[1]]
    fence = UpdateFence(lambda: queue.pop(0))
    fence.pass_update()
    fence.pass_update()
    assert waits == []
    fence.pass_update()
    assert waits == ["first"]
