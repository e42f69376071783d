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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from notebook_launcher.messaging.board_layout import COLLECTIVES, NUM_KEPT, ORDERS
from notebook_launcher.training.accumulation.members.held_gradients import parameter_groups
from notebook_launcher.training.parallelism.board_numbers import NUMBERS, distance, own_context
from notebook_launcher.wording.counts import rank_list
from notebook_launcher.wording.text import first_few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

__all__ = ["Unit", "UnitOrder"]

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
