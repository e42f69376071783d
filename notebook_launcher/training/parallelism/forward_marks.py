"""Marks that ranks of one machine leave on the board at each forward of a sharded model, for comparison by their peers.

A mark is two bytes in shared memory, so it costs no call of the system. A rank that has come out of a forward's gathers
knows that its peers have entered the forwards that paired with it, and so have marked them. They cannot have gone a
step further: their backward needs this rank, too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from notebook_launcher.context import RankContext, current
from notebook_launcher.messaging.board_layout import FORWARDS, STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Drift", "ForwardMarks"]


class Drift(NamedTuple):
    """Ranks whose forward paired with this rank's, and is another one."""

    fewer_forwards: list[int]
    """Ranks that have begun fewer forwards."""
    num_steps: int
    """Optimizer steps of this rank since its first forward of the model in this call."""
    steps: dict[int, int]
    """The same of ranks where it differs."""


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

    def begin(self) -> None:
        """Mark a forward that gathers."""
        context = _own_context()
        if context is None:
            return
        if context.call_id != self._call_id:  # The last call may have failed after a step on some ranks alone.
            self._call_id, self._steps_before = context.call_id, self._count_steps()
        board, mine = context.board, FORWARDS + context.rank
        board[STEPS + context.rank] = self._num_steps() % 256
        board[mine] = board[mine] % 255 + 1

    def compare(self) -> Drift | None:
        """Return how the peers differ, after a forward that has gathered; None if they agree."""
        context = _own_context()
        if context is None:
            return None
        board, num_steps = context.board, self._num_steps()
        num_forwards = board[FORWARDS + context.rank]
        fewer, steps = [], {}
        for peer in self._peers:
            theirs = board[FORWARDS + peer]
            if theirs == 0:
                continue
            if 0 < (num_forwards - theirs) % 255 < 128:
                fewer.append(peer)
            elif theirs == num_forwards and board[STEPS + peer] != num_steps % 256:
                difference = (board[STEPS + peer] - num_steps + 128) % 256 - 128
                steps[peer] = num_steps + difference
        return Drift(fewer, num_steps, steps) if fewer or steps else None

    def _num_steps(self) -> int:
        return self._count_steps() - self._steps_before


def _own_context() -> RankContext | None:
    """Return this rank's context; None outside a launch, and in a process that a rank has forked."""
    context = current()
    return None if context is None or context.pid != os.getpid() else context
