"""A check that the ranks of a sharded model gather and reduce its units, and step their optimizers, in the same order.

FSDP2 gathers the parameters of a unit from all ranks before the unit runs, and collectives pair in order. If rank 0
runs one layer and rank 1 another of the same shape, as with layers that each rank drops at random for itself, each
computes with halves of both, and their gradients are averaged into each other, without an error. A forward that rank 0
runs alone pairs with the next one of its peers. FSDP2 sends those gradients of a unit that a rank has: if rank 0 has
one of `a` alone and rank 1 one of `b`, the two are averaged. Units of other shapes end in gloo's abort or in a wait.

Before each of these collectives a rank marks on the board what it does, and looks at its peers' marks: who comes later
sees the mark of who came first. An optimizer step has a mark in this order, too. That costs shared memory and no call
of the system. Ranks of other machines are not compared.

A mark is made of the deed and the mark before it, so it stands for all deeds so far. Programs that run ahead of their
GPUs may be more than `NUM_KEPT` deeds apart, where marks are lost; a difference then shows at the next deed at which
they are close to each other again.
"""

from __future__ import annotations

import functools
import os
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from notebook_launcher.context import WAITING, RankContext, current
from notebook_launcher.messaging.board_layout import COLLECTIVES, NUM_KEPT, ORDERS
from notebook_launcher.training.accumulation.members import held_places, hold_zeros, parameter_groups, trained_places
from notebook_launcher.training.process.arrivals import describe_ahead, find_ahead
from notebook_launcher.wording import class_name, first_few, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


NUMBERS = 255
"""Deeds and marks are counted modulo this number, each in one byte."""
FACTOR = 31
"""Has no divisor in common with `NUMBERS`: a difference between two marks stays in all later ones."""
STEP = 0
"""The code of an optimizer step."""
SAME_ORDER = (
    "some ranks ran other layers, used others in the loss, left out an optimizer step, or ran a forward that others "
    "did not. Ranks of a sharded model gather parameters and reduce gradients unit by unit, so each must run the same "
    "layers in the same order, in the same forwards and backwards; otherwise ranks get each other's weights. Choose "
    "layers by something that is equal on all ranks, such as torch.Generator().manual_seed(step). Call "
    "optimizer.step() on every rank, and run no forward inside `if accelerator.is_main_process`: to evaluate on one "
    "rank, load accelerator.get_state_dict(model), which every rank must call, into a model that is not sharded."
)
OTHER_GRADIENTS = (
    "ranks of a sharded model reduce the gradients of a unit in one piece, so gradients of different parameters would "
    "be averaged into each other. If ranks use different parameters on purpose, pass "
    "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])."
)


class Unit(NamedTuple):
    """A unit of a sharded model: parameters that are gathered and reduced in one piece."""

    number: int
    """Its number among the units of all models of this Accelerator."""
    group: Any
    """Torch's state of the unit."""
    model: torch.nn.Module

    def describe(self, places: Iterable[int] | None = None) -> str:
        """Return the names of its parameters in the model, of all or of those at some places."""
        known = {id(parameter): name for name, parameter in self.model.named_parameters()}
        names = [
            known.get(id(parameter.sharded_param)) or known.get(id(getattr(parameter, "_unsharded_param", None)), "?")
            for parameter in self.group.fsdp_params
        ]
        return first_few(names if places is None else [names[place] for place in places])


class UnitOrder:
    """Compares the order of collectives for units of sharded models, and of optimizer steps, with the peers' order.

    Args:
        ranks: The ranks that share the models out.
        count_steps: Returns the number of steps that prepared optimizers have made.
    """

    def __init__(self, ranks: Iterable[int], count_steps: Callable[[], int]) -> None:
        self._peers = [rank for rank in ranks if rank != dist.get_rank()]
        self._count_steps = count_steps
        self._call_id: int | None = None
        """The call of the last deed."""
        self._num_steps = 0
        """Optimizer steps that have a mark, or were made before the first deed of the call."""
        self._units: list[Unit] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitOrder, ((), int)  # A copy of a model belongs to no process group.

    def add(self, model: torch.nn.Module, *, reduces_all: bool) -> None:
        """Check each gather and reduction of a model's units from now on; models come in the same order on all ranks.

        Args:
            model: The whole model, after it was sharded.
            reduces_all: True if a rank has zeros as gradients of the parameters that it does not use.
        """
        for group in parameter_groups(model):
            unit = Unit(len(self._units), group, model)
            self._units.append(unit)
            # Torch looks up these methods on the object in each forward and backward.
            group.unshard = functools.partial(self.gather, unit, group.unshard)
            if not reduces_all:
                group.post_backward = functools.partial(self.reduce, unit, group.post_backward)

    def gather(self, unit: Unit, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Gather the parameters of a unit.

        Raises:
            RuntimeError: A peer does something else at this place, or waits in a call that all ranks make.
        """
        context = self._context()
        if context and unit.group._all_gather_result is None and not unit.group.is_unsharded:  # noqa: SLF001 - as torch asks itself
            is_forward = torch._C._current_graph_task_id() == -1  # noqa: SLF001 - torch has no public name
            waiting = set(context.peers_in(WAITING) if is_forward else ()).intersection(self._peers)
            if waiting and (ahead := find_ahead(waiting)):
                raise RuntimeError(
                    f"{describe_ahead(ahead)}, and rank {context.rank} begins a forward of {class_name(unit.model)}, "
                    "which gathers parameters from all ranks: they would wait for each other forever. Make each of "
                    "these calls on every rank, in the same order, not inside `if accelerator.is_main_process`."
                )
            while self._num_steps < self._count_steps():
                self._num_steps += 1
                self._mark(context, STEP, lambda: "has made an optimizer step")
            self._mark(context, _code(unit, is_reduction=False), lambda: f"gathers {unit.describe()}")
        unshard(*args, **kwargs)

    def reduce(self, unit: Unit, post_backward: Callable[..., None], *unused: Any) -> None:
        """Reduce the gradients of a unit.

        Raises:
            RuntimeError: A peer does something else at this place, or reduces gradients of other parameters.
        """
        context = self._context()
        if context and unit.group.reduce_grads and (held := held_places(unit.group)):
            code = _code(unit, is_reduction=True)
            if held != trained_places(unit.group):
                # Another one at each place of the order: two that are equal by chance differ at the next one.
                salt = zlib.crc32(f"{unit.number} {held} {context.board[COLLECTIVES + context.rank]}".encode())
                code = self._first_part + salt % max(1, NUMBERS - self._first_part)
            self._mark(context, code, lambda: f"reduces the gradients of {unit.describe(held)}")
        post_backward(*unused)

    def _context(self) -> RankContext | None:
        """Return this rank's context; None outside a launch, in a forked process, and in a copy of a model."""
        context = current() if self._peers else None
        if context is None or context.pid != os.getpid():
            return None
        if self._call_id != context.call_id:  # The last call may have failed after a step on some ranks alone.
            self._call_id, self._num_steps = context.call_id, self._count_steps()
        return context

    @property
    def _first_part(self) -> int:
        """The first code of reductions of gradients that a unit has of some of its parameters alone."""
        return min(1 + 2 * len(self._units), NUMBERS - 1)

    def _mark(self, context: RankContext, code: int, describe: Callable[[], str]) -> None:
        """Mark the next deed on the board.

        Raises:
            RuntimeError: A peer's deed at this place is another one.
        """
        board, rank = context.board, context.rank
        last = board[COLLECTIVES + rank]
        before = board[_slot(rank, last)]
        place = last % NUMBERS + 1
        mark = (FACTOR * before + code) % NUMBERS
        # In this order, so that no peer reads the mark of an earlier deed.
        board[_slot(rank, place)] = mark
        board[COLLECTIVES + rank] = place
        odd = {peer: theirs for peer in self._peers if (theirs := _mark_of(board, peer, place)) not in (None, mark)}
        for peer, theirs in odd.items():
            if last == 0 or _mark_of(board, peer, last) == before:
                # Equal before, so the difference tells the peer's deed.
                other = (theirs - FACTOR * before) % NUMBERS
                cause = OTHER_GRADIENTS if self._first_part <= max(code, other) else SAME_ORDER
                if what := self._describe(other):
                    raise RuntimeError(f"Rank {rank} {describe()} while rank {peer} {what}: {cause}")
        if odd:
            raise RuntimeError(f"Rank {rank} {describe()} after other layers than {rank_list(list(odd))}: {SAME_ORDER}")

    def _describe(self, code: int) -> str:
        """Return what a code stands for; an empty text if it may be several deeds."""
        if code == STEP:
            return "has made an optimizer step"
        if code >= self._first_part:
            return "reduces those of other parameters"
        found = [(unit, is_reduction) for unit in self._units for is_reduction in (False, True)]
        deeds = [each for each in found if _code(*each) == code]
        if len(deeds) != 1:
            return ""
        unit, is_reduction = deeds[0]
        return f"{'reduces the gradients of' if is_reduction else 'gathers'} {unit.describe()}"


def _code(unit: Unit, is_reduction: bool) -> int:
    return 1 + (2 * unit.number + is_reduction) % (NUMBERS - 1)


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
    half = NUMBERS // 2
    ahead = (latest - place + half) % NUMBERS - half
    # One less than are kept, since one may be in writing, and one less where the numbers begin again.
    return latest > 0 and 0 <= ahead < NUM_KEPT - 2


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
