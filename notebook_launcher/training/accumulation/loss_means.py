"""Check that a loss is the mean over its micro-batch, in the units in which micro-batches are weighed.

Accumulation adds up gradients of means. A loss that is divided by something else, such as the number of tokens of the
whole window, is not a mean over its micro-batch: if a window is cut short, its gradient is too large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training import operations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LossOfTwo", "compare_losses"]


class LossOfTwo:
    """The losses of two micro-batches, and the loss of both joined into one.

    The joined loss is compared with the mean and the sum of the two.

    Args:
        first: Loss and weight of a micro-batch.
        second: Loss and weight of another.
        joined: Loss of the samples of both.
    """

    def __init__(self, first: tuple[float, float], second: tuple[float, float], joined: float) -> None:
        (loss_a, weight_a), (loss_b, weight_b) = first, second
        self.mean = (loss_a * weight_a + loss_b * weight_b) / (weight_a + weight_b)
        self.total = loss_a + loss_b
        self.joined = joined

    @property
    def difference(self) -> float:
        """Distance of the joined loss from the weighted mean of the two, relative to the larger."""
        return _relative(self.joined, self.mean)

    @property
    def adds_up(self) -> bool:
        """True if the joined loss is the sum of the two, so that the loss is not a mean over its micro-batch."""
        return _relative(self.joined, self.total) < self.difference / 10

    def __str__(self) -> str:
        found = f"the loss of two micro-batches joined is {self.joined:.4g}, their weighted mean {self.mean:.4g}"
        if self.adds_up:
            return (
                f"{found}, and their sum {self.total:.4g}. The loss is not divided by what its own micro-batch holds. "
                'Return the sum and pass it as backward(loss, weight=num_tokens, reduction="sum"), or divide by the '
                "micro-batch's own number and pass that as weight=."
            )
        return f"{found}. Pass as weight= what the loss is the mean over, such as the tokens that are not padding."


def compare_losses(
    model: torch.nn.Module,
    batches: Sequence[tuple[Any, float]],
    loss_function: Callable[[Any, Any], torch.Tensor],
    device: torch.device,
) -> LossOfTwo | None:
    """Return the losses of the first two micro-batches that have a weight; None if they cannot be joined.

    Args:
        model: Called as it is, without gradients.
        batches: Micro-batches with their weights.
        loss_function: `loss_function(model, batch)`.
        device: Device on which the batches are needed.
    """
    chosen = [(batch, weight) for batch, weight in batches if weight > 0][:2]
    if len(chosen) < 2:
        return None

    def loss_of(batch: Any) -> float:
        return float(loss_function(model, operations.send_to_device(batch, device)))

    with torch.no_grad():
        first, second = ((loss_of(batch), weight) for batch, weight in chosen)
        try:
            joined = loss_of(operations.concatenate([batch for batch, _ in chosen]))
        except (TypeError, ValueError, RuntimeError, IndexError):
            return None  # sequences of different lengths, or a function for one size of batch
    return LossOfTwo(first, second, joined)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / (max(abs(a), abs(b)) or 1.0)
