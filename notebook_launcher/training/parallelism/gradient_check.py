"""A check that the ranks of a sharded model reduce gradients of the same parameters in each unit.

FSDP2 sends the gradients of a unit in one piece, those that the rank has. If rank 0 has a gradient of `a` alone and
rank 1 one of `b`, and both are equally large, the two are averaged into each other without an error. DDP refuses the
same loop.

A rank writes which parameters of a unit have gradients where that changes, before it reduces them. It then waits until
its peers of this machine have come to the same reduction, in which they would have met anyway, and reads what they have
written: a reduction of different sizes would end in gloo's abort. Peers of other machines are compared afterwards: who
has come out of a reduction knows that every peer has entered it, and so has written.

At first all trained parameters have gradients. A loop in which that remains so writes one byte of shared memory in each
reduction, and waits for nobody.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from notebook_launcher.context import call_id
from notebook_launcher.messaging.board_layout import COLLECTIVES
from notebook_launcher.training.accumulation.members.held_gradients import held_places, trained_places
from notebook_launcher.training.parallelism.board_numbers import distance, own_context
from notebook_launcher.training.rank_check.bulletin import Bulletin
from notebook_launcher.wording.text import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from notebook_launcher.training.parallelism.unit_order import Unit, UnitOrder
    from notebook_launcher.training.queued_work import QueuedWork

__all__ = ["check_gradients"]

PATIENCE = 10.0
"""Seconds for which a rank waits for its peers."""
PAUSE = 0.0005
"""Seconds between two looks at the marks of the peers."""


def check_gradients(units: Iterable[Unit], order: UnitOrder, *, record: Callable[[], QueuedWork | None] | None) -> None:
    """Check each reduction of a sharded model's gradients from now on.

    Args:
        units: The units of the model.
        order: Compares the order of gathers and reductions, with the same peers.
        record: Marks the end of all work that is queued by now, or returns None if that cannot be done now. None: a
            reduction returns when it is done.
    """
    check = _GradientCheck(order, record)
    for unit in units:
        # Torch's hooks look up this method on the object when a backward has passed.
        unit.group.post_backward = functools.partial(check.reduce, _Reductions(unit), unit.group.post_backward)


class _Reductions:
    """The reductions of a unit in this call, and the parameters whose gradients the last one had."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.call_id: int | None = None
        """The call of the last reduction. Each begins anew: the one before may have failed on some ranks alone."""
        self.number = 0
        """Reductions so far."""
        self.places: list[int] | None = None
        """Places of the parameters with gradients; None before the first reduction of the call."""


class _GradientCheck:
    """Compares the parameters whose gradients are reduced with the peers'."""

    def __init__(self, order: UnitOrder, record: Callable[[], QueuedWork | None] | None) -> None:
        self._order = order
        self._record = record
        self._bulletin = Bulletin(dist.get_rank(), dist.get_world_size())

    def reduce(self, reductions: _Reductions, post_backward: Callable[..., None], *unused: Any) -> None:
        """Reduce the gradients of a unit.

        Raises:
            RuntimeError: A peer reduces gradients of other parameters.
        """
        group = reductions.unit.group
        held = held_places(group) if group.reduce_grads else []
        if not held:
            post_backward(*unused)
            return
        if reductions.call_id != (present := call_id()):
            reductions.call_id, reductions.number, reductions.places = present, 0, None
            self._bulletin.register(self)  # in the order of the backwards, the same on all ranks
        reductions.number += 1
        before = trained_places(group) if reductions.places is None else reductions.places
        reductions.places = held
        is_new = held != before and self._bulletin.write(self, _topic(reductions), [reductions.number, held])
        place = self._order.begin(reductions.unit, is_reduction=True)
        arrived = self._wait_for_peers(place) if is_new else []
        if is_new:
            self._refuse(reductions, arrived)
        post_backward(*unused)
        if is_new and len(arrived) < len(self._order.peers):
            work = None if self._record is None else self._record()
            if work is not None:
                work.synchronize()
            if work is not None or self._record is None:
                self._refuse(reductions, self._order.peers)

    def _wait_for_peers(self, place: int | None) -> list[int]:
        """Return the peers that have come to a reduction, after waiting for them; none on several machines.

        A peer that has not come after `PATIENCE` may have ended; the reduction ends as it would without this check.
        """
        context = own_context()
        if place is None or context is None or context.num_nodes > 1:
            return []
        board, deadline = context.board, time.monotonic() + PATIENCE
        while True:
            marks = {peer: board[COLLECTIVES + peer] for peer in self._order.peers}
            arrived = [peer for peer, mark in marks.items() if mark and distance(mark, place) >= 0]
            if len(arrived) == len(self._order.peers) or time.monotonic() > deadline:
                return arrived
            time.sleep(PAUSE)

    def _refuse(self, reductions: _Reductions, peers: Iterable[int]) -> None:
        """Raise RuntimeError if a peer has gradients of other parameters; all have come to the reduction."""
        # A peer that has never written has gradients of all.
        places = dict.fromkeys(peers, trained_places(reductions.unit.group))
        for rank, (number, held) in self._bulletin.read(self, _topic(reductions), peers).items():
            if number <= reductions.number:
                places[rank] = held
        odd = {rank: held for rank, held in sorted(places.items()) if held != reductions.places}
        if odd:
            raise RuntimeError(_explain(reductions, odd))

    def __reduce__(self) -> tuple[type[_NoComparison], tuple[()]]:
        return _NoComparison, ()


class _NoComparison:
    """Stands in for the check in a copy of a model, which belongs to no process group."""

    def reduce(self, _reductions: _Reductions, post_backward: Callable[..., None], *unused: Any) -> None:
        post_backward(*unused)


def _topic(reductions: _Reductions) -> str:
    return str(reductions.unit.number)


def _explain(reductions: _Reductions, odd: dict[int, list[int]]) -> str:
    rank, theirs = next(iter(odd.items()))
    mine = reductions.places or []
    names = reductions.unit.parameter_names()

    def named(places: Iterable[int]) -> str:
        return first_few([names[place] for place in places])

    here, rank_here = named(place for place in mine if place not in theirs), dist.get_rank()
    there = named(place for place in theirs if place not in mine)
    found = [(rank_here, here, rank), (rank, there, rank_here)]
    differences = "; ".join(
        f"rank {has} has gradients of {what} that rank {lacks} has not" for has, what, lacks in found if what
    )
    return (
        f"backward(): {differences}. Ranks of a sharded model reduce the gradients of a unit in one piece, so "
        "gradients of different parameters would be averaged into each other. If ranks use different parameters on "
        "purpose, pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])."
    )
