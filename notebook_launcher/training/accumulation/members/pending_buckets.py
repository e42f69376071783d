"""A bucket of gradients whose exchange goes on after the backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from notebook_launcher.training.accumulation.members.pending_gradients import PendingGradient

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["PendingBucket"]


class WaitingUpdate(Protocol):
    """The part of `updates.noted_updates.NotedUpdate` that is used here."""

    def make(self, bucket: PendingBucket) -> None:
        """Update the parameters of a bucket whose gradients are there."""
        ...


class PendingBucket:
    """Gradients that DDP reduces together, from the start of their exchange to its end.

    Args:
        bucket: DDP's bucket, a `torch.distributed.GradBucket`.
        finish: Function that finishes the exchange of this bucket.
    """

    def __init__(self, bucket: Any, finish: Callable[[PendingBucket], None]) -> None:
        self.parameters: list[torch.Tensor] = bucket.parameters()
        self.updates: list[WaitingUpdate] = []
        """Updates that wait for these gradients, in the order of their `step()`."""
        self.is_finished = False
        """True once the gradients are there, or are known never to come."""
        self._bucket = bucket
        self._finish = finish
        self._parts: list[torch.Tensor] = bucket.gradients()
        """The part of the bucket's memory that each parameter has."""
        self._reduction: Any = None
        """The future of the exchange; None until it is started."""
        self._pending: list[PendingGradient | None] = [None] * len(self.parameters)
        """The stand-in for each parameter's gradient; None for a parameter without one."""
        self._rescalings: list[tuple[torch.Tensor, Callable[[torch.Tensor], object]]] = []
        """Corrections that wait for the exchange, each with its gradient."""

    def start(self, hook: Callable[[Any, Any], Any], group: Any) -> Any:
        """Start the exchange by a communication hook, and return its future."""
        self._reduction = hook(group, self._bucket)
        return self._reduction

    @property
    def is_started(self) -> bool:
        """True after `start`."""
        return self._reduction is not None

    @property
    def is_exchanged(self) -> bool:
        """True if nothing is to be waited for any more."""
        return bool(self._reduction.done())

    def stand_in(self, number: int) -> None:
        """Put stand-ins in the places of the gradients, after DDP's own work on them."""
        for at, parameter in enumerate(self.parameters):
            if parameter.grad is not None:  # None: DDP has found that no rank used the parameter.
                self._pending[at] = pending = PendingGradient(parameter.grad, self, number)
                parameter.grad = pending

    def rescale(self, gradient: torch.Tensor, multiply: Callable[[torch.Tensor], object]) -> None:
        """Note the correction of a gradient, to be made after the exchange."""
        self._rescalings.append((gradient, multiply))

    def finish(self) -> None:
        """Wait for the exchange, and make the updates that wait for it."""
        if not self.is_finished:
            self._finish(self)

    def wait(self) -> None:
        """Wait for the exchange.

        Raises:
            RuntimeError: The exchange has failed.
        """
        self._reduction.wait()

    def deliver(self) -> None:
        """Put the exchanged numbers into the gradients, corrected."""
        self.is_finished = True
        for part, pending in zip(self._parts, self._pending, strict=True):
            if pending is not None and pending.gradient.data_ptr() != part.data_ptr():
                pending.gradient.copy_(part)
        for gradient, multiply in self._rescalings:
            multiply(gradient)
        for parameter, pending in zip(self.parameters, self._pending, strict=True):
            if pending is not None and parameter.grad is pending:
                parameter.grad = pending.gradient

    def make_updates(self) -> None:
        """Make the updates that have waited, with these gradients; a gradient that was cleared meanwhile stays so."""
        if self.updates:
            left = [parameter.grad for parameter in self.parameters]
            for parameter, pending in zip(self.parameters, self._pending, strict=True):
                parameter.grad = None if pending is None else pending.gradient
            try:
                for update in self.updates:
                    update.make(self)
            finally:
                for parameter, gradient in zip(self.parameters, left, strict=True):
                    parameter.grad = gradient
        self._release()

    def give_up(self) -> None:
        """Drop the gradients and updates of an exchange that has failed."""
        self.is_finished = True
        for parameter, pending in zip(self.parameters, self._pending, strict=True):
            if pending is not None and parameter.grad is pending:
                parameter.grad = None
        self._release()

    def _release(self) -> None:
        """Let go of the gradients. A stand-in that somebody holds refers to its bucket, so only its gradient stays."""
        self.updates.clear()
        self._rescalings.clear()
        self._pending.clear()
        self._parts.clear()
        self._bucket = None
