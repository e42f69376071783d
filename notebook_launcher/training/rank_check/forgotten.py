"""Optimizers that were not prepared, found when they step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from notebook_launcher.training.accumulation.members.ddp import FORWARD_SYNCED
from notebook_launcher.training.accumulation.members.targets import parameters_of
from notebook_launcher.training.fingerprints import is_comparable

if TYPE_CHECKING:
    from notebook_launcher.training.accumulation.members.members import Members
    from notebook_launcher.training.rank_check.gradient_comparison import GradientComparison

__all__ = ["ForgottenOptimizers"]


class ForgottenOptimizers:
    """Looks at every optimizer step of the process, for as long as this object lives.

    A prepared optimizer checks by itself that its gradients were synchronised. One that was not prepared steps in
    every micro-batch of a window, each rank with its own gradients.

    Args:
        members: Models and tensors that are trained.
        gradients: Compares gradients that no backward of the Accelerator has computed.
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
            if isinstance(hook, _StepCheck) and hook.is_dead:
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

    def outside_parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the `outside` optimizers, as far as ranks can compare them."""
        return [tensor for optimizer in self.outside for tensor in parameters_of(optimizer) if is_comparable(tensor)]


class _StepCheck:
    """The hook of `ForgottenOptimizers`; once these are gone it does nothing, and the next ones remove it."""

    def __init__(self, forgotten: ForgottenOptimizers) -> None:
        self._forgotten = weakref.ref(forgotten)

    @property
    def is_dead(self) -> bool:
        """True if what the hook looks for is gone."""
        return self._forgotten() is None

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Check a step before it is made."""
        forgotten = self._forgotten()
        if forgotten is None or torch.compiler.is_compiling():
            return
        checked, forgotten.checked = forgotten.checked, None
        if checked != id(optimizer):
            forgotten.check(optimizer)
            forgotten.note(optimizer)
