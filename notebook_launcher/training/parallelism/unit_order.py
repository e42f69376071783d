"""A check that the ranks of a sharded model gather and reduce its units in the same order.

FSDP2 gathers the parameters of a unit from all ranks before the unit runs, and collectives pair in order. If rank 0
runs one layer and rank 1 another of the same shape, as with layers that each rank drops at random for itself, each
computes with halves of both, and their gradients are averaged into each other, without an error. Units of other shapes
end in gloo's abort or in a wait.

Before each of these collectives a rank marks on the board which unit it is for, and looks at its peers' marks: who
comes later sees the mark of who came first. That costs shared memory and no call of the system. Ranks of other machines
are not compared.

A mark is made of the unit and the mark before it, so it stands for all collectives so far. Programs that run ahead of
their GPUs may be more than `NUM_KEPT` collectives apart, where marks are lost; a difference then shows at the next
collective at which they are close to each other again.
"""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from notebook_launcher.context import RankContext, call_id, current
from notebook_launcher.messaging.board_layout import COLLECTIVES, NUM_KEPT, ORDERS
from notebook_launcher.training.accumulation.members import held_places, hold_zeros, parameter_groups, trained_places
from notebook_launcher.training.rank_check.check import Bulletin
from notebook_launcher.wording import first_few, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from notebook_launcher.training.queued_work import QueuedWork


FACTOR = 31
"""Has no divisor in common with `NUMBERS`: a difference between two marks stays in all later ones."""
SAME_ORDER = (
    "some ranks ran other layers, used others in the loss, or ran a forward that others did not. A sharded model "
    "gathers parameters and reduces gradients unit by unit, so each rank must run the same layers in the same order, "
    "in the same forwards and backwards; otherwise ranks get each other's weights. Choose layers by something that is "
    "equal on all ranks, such as torch.Generator().manual_seed(step), and run no forward inside "
    "`if accelerator.is_main_process`."
)


class Unit(NamedTuple):
    """A unit of a sharded model: parameters that are gathered and reduced in one piece."""

    number: int
    """Its number among the units of all models of this Accelerator."""
    group: Any
    """Torch's state of the unit."""
    model: torch.nn.Module

    def parameter_names(self) -> list[str]:
        """Return the names of its parameters in the model, in the order in which torch keeps them."""
        known = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [
            known.get(id(parameter.sharded_param)) or known.get(id(getattr(parameter, "_unsharded_param", None)), "?")
            for parameter in self.group.fsdp_params
        ]


class UnitOrder:
    """Compares the order of collectives for units of sharded models with the peers' order.

    Args:
        ranks: The ranks that share the models out.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.peers = [rank for rank in ranks if rank != dist.get_rank()]
        """The other ranks among them."""
        self._units: list[Unit] = []

    def add(self, model: torch.nn.Module) -> list[Unit]:
        """Check each gather of a model's units from now on, and return the units; in the same order on all ranks."""
        first = len(self._units)
        added = [Unit(first + place, group, model) for place, group in enumerate(parameter_groups(model))]
        self._units += added
        for unit in added:
            # Torch looks up this method on the object in each forward and backward.
            unit.group.unshard = functools.partial(self.gather, unit, unit.group.unshard)
        return added

    def gather(self, unit: Unit, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Gather the parameters of a unit.

        Raises:
            RuntimeError: A peer's collective at this place is for another unit.
        """
        group = unit.group
        if group._all_gather_result is None and not group.is_unsharded:  # noqa: SLF001 - as torch asks itself
            self.begin(unit, is_reduction=False)
        unshard(*args, **kwargs)

    def begin(self, unit: Unit, *, is_reduction: bool) -> int | None:
        """Mark that a collective begins, and return its number on the board; None outside a launch.

        Raises:
            RuntimeError: A peer's collective at this place is for another unit.
        """
        context = own_context()
        if context is None:
            return None
        board, rank = context.board, context.rank
        last = board[COLLECTIVES + rank]
        before = board[_slot(rank, last)]
        place = last % NUMBERS + 1
        mark = (FACTOR * before + _code(unit, is_reduction)) % NUMBERS
        # In this order, so that no peer reads the mark of an earlier collective.
        board[_slot(rank, place)] = mark
        board[COLLECTIVES + rank] = place
        odd = {peer: theirs for peer in self.peers if (theirs := _mark_of(board, peer, place)) not in (None, mark)}
        if odd:
            # Equal before, so the difference tells the peer's unit.
            codes = {
                peer: (theirs - FACTOR * before) % NUMBERS
                for peer, theirs in odd.items()
                if last == 0 or _mark_of(board, peer, last) == before
            }
            raise RuntimeError(self._explain(unit, is_reduction, odd, codes))
        return place

    def _explain(self, unit: Unit, is_reduction: bool, odd: Iterable[int], codes: dict[int, int]) -> str:
        mine = f"Rank {dist.get_rank()} {_describe(unit, is_reduction)}"
        for peer, code in codes.items():
            found = [(unit, is_reduction) for unit in self._units for is_reduction in (False, True)]
            names = [_describe(*each) for each in found if _code(*each) == code]
            if len(names) == 1:
                return f"{mine} while rank {peer} {names[0]}: {SAME_ORDER}"
        return f"{mine} after other layers than {rank_list(list(odd))}: {SAME_ORDER}"

    def __reduce__(self) -> tuple[type[_NoOrder], tuple[()]]:
        return _NoOrder, ()


class _NoOrder:
    """Stands in for the check in a copy of a model, which belongs to no process group."""

    def gather(self, _unit: Unit, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        unshard(*args, **kwargs)


def _code(unit: Unit, is_reduction: bool) -> int:
    return 1 + (2 * unit.number + is_reduction) % (NUMBERS - 1)


def _describe(unit: Unit, is_reduction: bool) -> str:
    listed = first_few(unit.parameter_names())
    return f"reduces the gradients of {listed}" if is_reduction else f"gathers {listed}"


def _slot(rank: int, place: int) -> int:
    return ORDERS + NUM_KEPT * rank + place % NUM_KEPT


def _mark_of(board: Any, peer: int, place: int) -> int | None:
    """Return a peer's mark at a place; None if it has not come there, or its mark is lost."""
    if not _keeps(board[COLLECTIVES + peer], place):
        return None
    mark: int = board[_slot(peer, place)]
    # Read once more: meanwhile the peer may have written over it.
    return mark if _keeps(board[COLLECTIVES + peer], place) else None


def _keeps(latest: int, place: int) -> bool:
    # One less than are kept, since one may be in writing, and one less where the numbers begin again.
    return latest > 0 and 0 <= distance(latest, place) < NUM_KEPT - 2


# --------------------------------------------------------------------------------------------------------------------
# A check that the ranks of a sharded model reduce gradients of the same parameters in each unit.
#
# FSDP2 sends the gradients of a unit in one piece, those that the rank has. If rank 0 has a gradient of `a` alone and
# rank 1 one of `b`, and both are equally large, the two are averaged into each other without an error. DDP refuses
# the same loop.
#
# A rank writes which parameters of a unit have gradients where that changes, before it reduces them. It then waits
# until its peers of this machine have come to the same reduction, in which they would have met anyway, and reads what
# they have written: a reduction of different sizes would end in gloo's abort. Peers of other machines are compared
# afterwards: who has come out of a reduction knows that every peer has entered it, and so has written.
#
# At first all trained parameters have gradients. A loop in which that remains so writes one byte of shared memory in
# each reduction, and waits for nobody.


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


# --------------------------------------------------------------------------------------------------------------------
# Gradients of parameters that one rank uses and another does not: FSDP2 reduces those alone that a rank has.


def reduce_unused(sharded: torch.nn.Module) -> None:
    """Let every rank reduce the gradients of all trained parameters of a unit, and give zeros for those not used."""
    model: Any = sharded
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
        return
    # Torch 2.11 has no such switch. Its hooks, too, look up this method on the object when a backward has passed.
    for group in parameter_groups(sharded):
        group.post_backward = functools.partial(_reduce_all, group, group.post_backward)


def _reduce_all(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    if group.reduce_grads:
        hold_zeros(group)
    post_backward(*unused)


# --------------------------------------------------------------------------------------------------------------------
# Numbers that ranks of one machine count on the board, each in one byte.


NUMBERS = 255
"""Forwards, reductions and steps are counted modulo this number."""


def distance(place: int, other: int) -> int:
    """Return by how much one number is ahead of another, both modulo `NUMBERS`; negative: it is behind."""
    half = NUMBERS // 2
    return (place - other + half) % NUMBERS - half


def own_context() -> RankContext | None:
    """Return this rank's context; None outside a launch, and in a process that a rank has forked."""
    context = current()
    return None if context is None or context.pid != os.getpid() else context
