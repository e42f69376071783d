"""The error for ranks that differ: the parameter, the ranks, the size of the difference, and the probable cause."""

from __future__ import annotations

import collections
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from notebook_launcher.training.accumulation.members import FORWARD_SYNCED, parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from notebook_launcher.training.accumulation.members import Members, Notes
    from notebook_launcher.training.fingerprints import Sketch
    from notebook_launcher.training.rank_check.check import GradientComparison


SWITCH = "check_ranks=False, of an Accelerator or a launch, switches this check off."


def describe_divergence(
    what: str,
    values: Mapping[int, Any],
    rates: Mapping[int, tuple[float, ...]],
    sketches: Mapping[int, Mapping[str, Sketch]],
    *,
    where: str,
    title: str,
    notes: Notes,
    unowned: frozenset[str],
) -> tuple[str, bool]:
    """Return the report, and True if it is an error: False where the ranks differ by rounding alone.

    Args:
        what: `"weights"`, `"rates"` or `"state"`, the first of them that differs.
        values: A value of each rank; equal values mean that the ranks agree.
        rates: The learning rates of each rank.
        sketches: The sketches of the tensors concerned, by rank and name.
        where: `"update 4"` or the name of a call.
        title: The model's name.
        notes: The model's notes.
        unowned: Names of parameters that no prepared optimizer updates.
    """
    listed = {rank: ", ".join(f"{rate:.6g}" for rate in mine) for rank, mine in sorted(rates.items())}
    by_rank = "; ".join(f"{mine} on rank {rank}" for rank, mine in listed.items())
    rates_differ = (
        f"The learning rates differ: {by_rank}. Step schedulers, and change learning rates, on every rank alike."
    )
    if what == "rates":
        return f"{where}: {rates_differ} {SWITCH}", True
    # The first rank of the largest group that agrees, and the ranks that differ from it.
    counts = collections.Counter(values.values())
    reference = min(values, key=lambda rank: (-counts[values[rank]], rank))
    others = sorted(rank for rank, value in values.items() if value != values[reference])
    ranks = f"rank{'s' * (len(others) > 1)} {named(others)}"
    things = "weights" if what == "weights" else "optimizer's states"
    text = f"{where}: the {things} of {title} on {ranks} differ from those on rank {reference}"
    distances = _distances(sketches, reference, others)
    # What rounding alone can have made: a few times its error, which adds up.
    rounding = 4.0 * math.sqrt(notes.num_synced + 1)
    large = [name for name, far in distances.items() if far > rounding * sketches[reference][name].epsilon]
    if large:
        causes = [
            (STATE, what == "state"),
            (rates_differ, len(set(rates.values())) > 1),
            (OWN_STATE.format(notes.own_state), bool(notes.own_state)),
            (BEFORE, notes.num_synced <= 1),
            (UNOWNED, large[0] in unowned),
        ]
        cause = next((cause for cause, holds in causes if holds), OTHER)
        total = max(map(len, sketches.values()))
        distance = distances[large[0]]
        share = f"{100 * distance:.{0 if distance > 0.01 else 2}g} % of" if distance < 1 else "more than"
        first = f"first in {large[0]}, by {share} its size, and in {len(large)} of {total} tensors"
        return f"{text}, {first}. {cause} {SWITCH}", True
    if distances:
        reason = "Kernels of different devices, or different numbers of threads, can be the reason."
        return f"{text} by rounding alone, first in {next(iter(distances))}. {reason}", False
    return f"{text}. {SWITCH}", True  # a rank that ended meanwhile has not reported in which


def named(ranks: Iterable[int]) -> str:
    """Return `1`, `1 and 3`, or `1, 2 and 3`."""
    *first, last = map(str, sorted(ranks))
    return f"{', '.join(first)} and {last}" if first else last


STATE = (
    "The weights are still equal, but the next update makes them differ. Load or change an optimizer's state on every "
    "rank alike."
)
OWN_STATE = (
    "{} left each rank an optimizer state of its own. Make and prepare a new optimizer after it, or one without state."
)
BEFORE = (
    "prepare() had made them equal, so ranks have changed them since, before the first update: weights that were "
    "initialised after prepare(), from random numbers of which each rank draws its own, or loaded on some ranks. Do "
    "that before prepare(), which gives all ranks the weights of rank 0. Or a step was made by an optimizer that was "
    "not prepared: write `model, optimizer = accelerator.prepare(model, optimizer)`."
)
UNOWNED = (
    "No prepared optimizer has this parameter, so something else has changed it. Write `model, optimizer = "
    "accelerator.prepare(model, optimizer)`."
)
OTHER = (
    "Some ranks have changed weights or gradients by themselves: by random numbers, by loading, by a step or a change "
    "under `if accelerator.is_main_process`, or by changing gradients after backward(). Do the same on every rank."
)


def _distances(sketches: Mapping[int, Mapping[str, Sketch]], reference: int, others: list[int]) -> dict[str, float]:
    """Return the tensors that differ on any rank, in their order, each with its largest relative distance."""
    base = sketches.get(reference, {})
    found: dict[str, float] = {}
    for name, mine in base.items():
        theirs = [sketches[rank][name] for rank in others if name in sketches.get(rank, {})]
        if any(sketch.bits != mine.bits for sketch in theirs):
            found[name] = max(mine.distance(sketch) for sketch in theirs)
    return found


# --------------------------------------------------------------------------------------------------------------------
# Optimizers that were not prepared, found when they step.


class ForgottenOptimizers:
    """Looks at every optimizer step of the process, for as long as this object lives.

    A prepared optimizer checks by itself that its gradients were synchronised. One that was not prepared steps in
    every micro-batch of a window, each rank with its own gradients.
    """

    def __init__(self, members: Members, gradients: GradientComparison) -> None:
        self._members = members
        self._gradients = gradients
        self._version = -1
        """The members' version to which `_stepped` belongs."""
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        """Optimizers in the order of their first steps since members were added last: True for those that update
        nothing that was prepared."""
        self.checked: int | None = None
        """The id of the prepared optimizer whose next step was checked already. It is about to step, so it lives."""
        hooks = register_optimizer_step_pre_hook(_StepCheck(self)).hooks_dict_ref() or {}
        # Not by a finalizer: the garbage collector may run it while torch goes through the hooks of a step.
        for key, hook in list(hooks.items()):
            if isinstance(hook, _StepCheck) and hook.forgotten() is None:
                del hooks[key]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if a step of this optimizer would use gradients that were not synchronised.

        An optimizer inside a prepared one, as `ZeroRedundancyOptimizer` has it, passes: the outer one was checked.
        """
        local = []
        for member in self._members.synced_models:  # no comprehension: its call would take longer than its work
            notes = member.notes
            if not ((notes.answered | notes.forwards) & FORWARD_SYNCED or notes.trains_alone):
                local.append(member)
        if not local:
            return
        mine = {id(parameter) for parameter in parameters_of(optimizer)}
        for member in local:
            model = member.module
            if any(id(parameter) in mine and parameter.grad is not None for parameter in model.trained):
                if self._members.are_set_by_hand(member.notes):
                    self._gradients.compare(member)
                    continue
                name, kind = type(model.module).__name__, type(optimizer).__name__
                raise RuntimeError(
                    f"step(): this {kind} was not prepared, and would update the {name} on each rank with the rank's "
                    "own gradients, which are synchronised only where a window ends. Write `model, optimizer = "
                    "accelerator.prepare(model, optimizer)`: a prepared optimizer steps there."
                )

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that updates nothing that was prepared."""
        if self._version != self._members.version:
            self._version = self._members.version
            self._stepped.clear()
        if optimizer not in self._stepped:
            prepared = self._members.contains_any(parameters_of(optimizer))
            self._stepped[optimizer] = bool(self._members.synced_models) and not prepared

    @property
    def outside(self) -> list[torch.optim.Optimizer]:
        """Optimizers that have stepped and whose parameters belong to nothing that was prepared."""
        return [optimizer for optimizer, outside in self._stepped.items() if outside]


class _StepCheck:
    """The hook of `ForgottenOptimizers`; once these are gone it does nothing, and the next ones remove it."""

    def __init__(self, forgotten: ForgottenOptimizers) -> None:
        self.forgotten = weakref.ref(forgotten)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Check a step before it is made."""
        forgotten = self.forgotten()
        if forgotten is None or torch.compiler.is_compiling():
            return
        checked, forgotten.checked = forgotten.checked, None
        if checked != id(optimizer):
            forgotten.check(optimizer)
            forgotten.note(optimizer)
