"""Comparison of gradients that no backward of the Accelerator has computed, before a step uses them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.fingerprints import fingerprint, is_comparable
from notebook_launcher.training.rank_check.divergence import SWITCH

if TYPE_CHECKING:
    from notebook_launcher.training.accumulation.members.member import Member
    from notebook_launcher.training.rank_check.bulletin import Bulletin

__all__ = ["GradientComparison"]


class GradientComparison:
    """Compares gradients of `loss.backward()`, of `torch.autograd.grad` and of the user at steps 1, 2, 4, 8 and so on.

    Args:
        bulletin: Shows the ranks each other's fingerprints.
        num_processes: Ranks that train together.
    """

    def __init__(self, bulletin: Bulletin, num_processes: int) -> None:
        self._bulletin = bulletin
        self._num_processes = num_processes
        self._num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """By model: its steps with such gradients."""

    def compare(self, member: Member) -> None:
        """Compare the gradients of a model, at a step that uses them.

        Raises:
            RuntimeError: The gradients differ between the ranks; on every rank.
        """
        self._num_steps[member] = number = self._num_steps.get(member, 0) + 1
        if number & (number - 1):
            return
        trained = [parameter for parameter in member.synchronised if is_comparable(parameter)]
        mine = fingerprint(parameter.grad for parameter in trained if parameter.grad is not None)
        found = self._bulletin.exchange(member, f"gradients {number}", mine, range(self._num_processes))
        if len(set(found.values())) > 1:
            raise RuntimeError(
                f"step(): the gradients of {member.describe()} differ between the ranks, so the weights "
                "would diverge. No accelerator.backward(loss) has computed them, and gradients of "
                "torch.autograd.grad, or set by hand, are not synchronised. Call accelerator.backward(loss), or "
                f"average them: parameter.grad = accelerator.reduce(gradient, 'mean'). {SWITCH}"
            )
