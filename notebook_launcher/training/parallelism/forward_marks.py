"""Marks that ranks of one machine leave on the board at each forward of a sharded model, for comparison by their peers.

A mark is two bytes in shared memory, so it costs no call of the system. A rank that has come out of a forward's gathers
knows that its peers have entered the forwards that paired with it, and so have marked them.

A program runs ahead of its GPU. It has come out of a gather when the GPU has passed it, so the numbers of forwards are
compared then, at a later forward. The numbers of steps before a forward are the same whenever they are compared.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.messaging.board_layout import FORWARDS, STEPS
from notebook_launcher.training.parallelism.board_numbers import NUMBERS, distance, own_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from notebook_launcher.training.queued_work import QueuedWork

__all__ = ["Drift", "ForwardMark", "ForwardMarks", "PassedForwards"]

IN_WRITING = 255
"""The steps of a mark that is being written."""
MAX_AHEAD = 32
"""Forwards that a program may be ahead of its GPU. Two programs are then less than `NUMBERS` / 2 apart."""


class ForwardMark(NamedTuple):
    """A forward that gathers, of this rank."""

    place: int
    """Its number on the board, from 1 to 255."""
    number: int
    """Its number among the model's forwards, for messages."""
    num_steps: int
    """Optimizer steps of this rank before it, since its first forward of the model in this call."""


class Drift(NamedTuple):
    """Ranks whose forward paired with this rank's, and is another one."""

    forward: ForwardMark
    fewer_forwards: list[int]
    """Ranks that had begun fewer forwards."""
    steps: dict[int, int]
    """`ForwardMark.num_steps` of ranks where it differs."""


class ForwardMarks:
    """The marks of this rank and its peers; without effect outside a launch.

    Args:
        peers: Ranks that share the model out with this one.
        count_steps: Returns the number of optimizer steps so far, in this run or before.
    """

    def __init__(self, peers: Sequence[int], count_steps: Callable[[], int]) -> None:
        self._peers = peers
        self._count_steps = count_steps
        self._call_id: int | None = None
        """The call of the last forward; None before the first one."""
        self._steps_before = 0
        """Optimizer steps before the first forward in that call."""

    def begin(self, number: int) -> ForwardMark | None:
        """Mark a forward that gathers, and return the mark; None outside a launch."""
        context = own_context()
        if context is None:
            return None
        if context.call_id != self._call_id:  # The last call may have failed after a step on some ranks alone.
            self._call_id, self._steps_before = context.call_id, self._count_steps()
        board, mine = context.board, FORWARDS + context.rank
        mark = ForwardMark(board[mine] % NUMBERS + 1, number, self._count_steps() - self._steps_before)
        context.forwards[mark.place] = mark
        # In this order, so that no peer takes steps for those of another forward.
        board[STEPS + context.rank] = IN_WRITING
        board[mine] = mark.place
        board[STEPS + context.rank] = mark.num_steps % NUMBERS
        return mark

    def compare_forwards(self, mark: ForwardMark) -> Drift | None:
        """Return which peers had not begun a forward, after its gathers; None if all had."""
        context = own_context()
        if context is None:
            return None
        board = context.board
        theirs = {peer: board[FORWARDS + peer] for peer in self._peers}
        fewer = [peer for peer, place in theirs.items() if place and distance(mark.place, place) > 0]
        return Drift(mark, fewer, {}) if fewer else None

    def compare_steps(self) -> Drift | None:
        """Return how the peers' steps before their latest forwards differ from this rank's; None if they agree.

        A peer that is ahead is left out: it finds the difference itself.
        """
        context = own_context()
        if context is None:
            return None
        latest = context.board[FORWARDS + context.rank]
        drifts: dict[ForwardMark, dict[int, int]] = {}
        for peer in self._peers:
            place, steps = _whole_mark(context.board, peer)
            mark = context.forwards.get(place)
            if mark is None or distance(place, latest) > 0 or steps == mark.num_steps % NUMBERS:
                continue
            drifts.setdefault(mark, {})[peer] = mark.num_steps + distance(steps, mark.num_steps)
        return next((Drift(mark, [], steps) for mark, steps in drifts.items()), None)


def _whole_mark(board: Any, peer: int) -> tuple[int, int]:
    """Return the place and steps of a peer's mark; place 0 if it has none, or writes one just now."""
    place, steps = board[FORWARDS + peer], board[STEPS + peer]
    is_whole = steps != IN_WRITING and board[FORWARDS + peer] == place
    return (place if is_whole else 0), steps


class PassedForwards:
    """Forwards whose gathers are queued on a GPU, until the GPU has passed them."""

    def __init__(self) -> None:
        self._queued: collections.deque[tuple[ForwardMark, QueuedWork]] = collections.deque()

    def add(self, mark: ForwardMark, work: QueuedWork) -> None:
        """Add a forward, and the work that ends with its gathers."""
        self._queued.append((mark, work))

    def take(self) -> Iterator[ForwardMark]:
        """Yield the forwards that the GPU has passed since; wait for those that are too far behind."""
        while self._queued:
            mark, work = self._queued[0]
            if len(self._queued) > MAX_AHEAD:
                work.synchronize()
            elif not work.query():
                return
            self._queued.popleft()
            yield mark
