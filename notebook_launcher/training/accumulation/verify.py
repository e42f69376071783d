"""A check of accumulation against the full batch, on the user's own model and data."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training import operations
from notebook_launcher.training.unwrapping import unwrap_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOfTwo:
    """The losses of two micro-batches, beside the loss of both joined into one.

    Accumulation adds up gradients of means. A loss that is divided by something else, such as the number of tokens of
    the whole window, is not a mean over its micro-batch: if a window is cut short, its gradient is too large.
    """

    mean: float
    """The weighted mean of the two."""
    total: float
    """Their sum."""
    joined: float
    """The loss of the samples of both."""

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


def _relative(a: float, b: float) -> float:
    return abs(a - b) / (max(abs(a), abs(b)) or 1.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationReport:
    """The difference between accumulated gradients and the gradients of the full batch."""

    max_difference: float
    """The largest absolute difference of an element."""
    relative: float
    """`max_difference` over the largest absolute element of the full batch's gradient."""
    parameter: str
    """The parameter with the largest difference."""
    nominal: float
    """The relative difference that dividing by the nominal number of micro-batches would have made."""
    num_micro_batches: int
    """Micro-batches on all ranks."""
    total_weight: float
    """Samples, or what `weight` counted, on all ranks."""
    tolerance: float
    losses: LossOfTwo | None = None
    """The losses of two micro-batches and of both joined; None if they could not be joined."""
    loss_tolerance: float = 1e-4
    """The largest relative difference between the joined loss and the mean of the two."""

    @property
    def ok(self) -> bool:
        """True if the gradients agree within the tolerance, and the loss is the mean over its micro-batch."""
        return self.relative <= self.tolerance and self.loss_is_mean

    @property
    def loss_is_mean(self) -> bool:
        """False if the loss of two micro-batches joined is not the weighted mean of their losses."""
        return self.losses is None or self.losses.difference <= self.loss_tolerance

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return (
            f"{'exact' if self.ok else 'NOT EXACT'}: {self.num_micro_batches} micro-batches (weight "
            f"{self.total_weight:g}) differ from the full batch by at most {self.max_difference:.2e} "
            f"({self.relative:.1e} of the largest gradient, at {self.parameter}); division by the nominal number of "
            f"micro-batches would differ by {self.nominal:.1e}"
            f"{'' if self.loss_is_mean else f'; NOT A MEAN: {self.losses}'}"
        )


def check_accumulation(
    accelerator: Any,
    model: Any,
    batches: Iterable[Any],
    loss_function: Callable[[Any, Any], torch.Tensor],
    *,
    weight: Callable[[Any], float] | None = None,
    tolerance: float = 1e-5,
) -> AccumulationReport:
    """Accumulate one window, and compare its gradient with the full batch's on one process.

    Nothing is updated: weights, gradients and buffers stay as they are. The model is in evaluation mode meanwhile,
    because dropout draws differently for other batches. Every rank must call this function.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: As `prepare` returned it.
        batches: This rank's micro-batches; at most `gradient_accumulation_steps` are taken, fewer if it has fewer. A
            prepared loader will do.
        loss_function: `loss_function(model, batch)` gives the mean loss of a micro-batch.
        weight: Samples or tokens that the loss is the mean over; None: the size of the batch's first dimension.
        tolerance: The largest relative difference that counts as exact.

    Returns:
        The largest difference, and where; true if it is within the tolerance, and if the loss of two micro-batches
        joined is the weighted mean of their losses. That finds a wrong `weight`, and a loss that is divided by what the
        whole window holds. Batches that cannot be joined, such as sequences of different lengths, are not compared so.

    Raises:
        ValueError: The loader has no micro-batch.
    """
    count = weight or (lambda batch: float(operations.find_batch_size(batch) or 1))
    iterator = iter(batches)
    window = list(itertools.islice(iterator, accelerator.gradient_accumulation_steps))
    if hasattr(iterator, "close"):
        iterator.close()  # a prepared loader is no longer the active one
    gathered = operations.gather_object([(operations.send_to_device(batch, "cpu"), count(batch)) for batch in window])
    if not window or not gathered:
        raise ValueError("check_accumulation(batches=...) gave no micro-batch on some rank. Pass a list of batches.")
    inner = unwrap_model(model)
    named = {name: parameter for name, parameter in inner.named_parameters() if parameter.requires_grad}
    # As with a prepared loader: a rank with fewer batches adds some of weight zero, so that all windows end together.
    missing = max(operations.gather_object([len(window)])) - len(window)
    weighted = [(batch, count(batch)) for batch in window] + [(window[-1], 0.0)] * missing
    with _set_aside(inner, named):
        accumulated = _accumulate(accelerator, model, weighted, loss_function, named)
        full = _full_batch(accelerator, inner, gathered, loss_function)
        losses = _compare_losses(inner, gathered, loss_function, accelerator.device)
    scale = max((float(grad.abs().max()) for grad in full.values()), default=0.0) or 1.0
    parameter, difference = max(
        ((name, float((accumulated[name] - full[name]).abs().max())) for name in full), key=lambda pair: pair[1]
    )
    total = sum(size for _, size in gathered)
    share = len(gathered) / (accelerator.gradient_accumulation_steps * accelerator.num_processes)
    return AccumulationReport(
        max_difference=difference,
        relative=difference / scale,
        parameter=parameter,
        nominal=abs(share - 1.0),
        num_micro_batches=len(gathered),
        total_weight=float(total),
        tolerance=tolerance,
        losses=losses,
        loss_tolerance=max(tolerance, 1e-4 if accelerator.mixed_precision == "no" else 1e-2),
    )


@contextlib.contextmanager
def _set_aside(inner: torch.nn.Module, named: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """Evaluate the model without gradients in the block, and restore gradients, buffers and modes at its end."""
    grads = {name: parameter.grad for name, parameter in named.items()}
    buffers = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    modes = {module: module.training for module in inner.modules()}
    inner.eval()
    for parameter in named.values():
        parameter.grad = None
    try:
        yield
    finally:
        for name, parameter in named.items():
            parameter.grad = grads[name]
        with torch.no_grad():
            for name, buffer in inner.named_buffers():
                buffer.copy_(buffers[name])
        for module, mode in modes.items():
            module.training = mode


def _accumulate(
    accelerator: Any,
    model: Any,
    window: list[tuple[Any, float]],
    loss_function: Callable[[Any, Any], torch.Tensor],
    named: dict[str, torch.nn.Parameter],
) -> dict[str, torch.Tensor]:
    """Return what a window of the Accelerator gathers; the number of steps is the window's meanwhile."""
    steps = accelerator.gradient_accumulation_steps
    sync = accelerator.sync_gradients
    accelerator.gradient_accumulation_steps = len(window)
    try:
        for batch, weight in window:
            with accelerator.accumulate(model):
                moved = operations.send_to_device(batch, accelerator.device)
                accelerator.backward(loss_function(model, moved), weight=weight)
    finally:
        accelerator.gradient_accumulation_steps = steps
        accelerator.sync_gradients = sync
    scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    gathered = {}
    for name, parameter in named.items():
        gathered[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach() / scale
        parameter.grad = None
    return gathered


def _full_batch(
    accelerator: Any,
    inner: torch.nn.Module,
    gathered: list[tuple[Any, float]],
    loss_function: Callable[[Any, Any], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean over all ranks' micro-batches, computed by this process alone."""
    alone = copy.deepcopy(inner)
    alone.zero_grad()
    total = sum(size for _, size in gathered) or 1.0
    for batch, size in gathered:
        loss = loss_function(alone, operations.send_to_device(batch, accelerator.device))
        (loss * (size / total)).backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in alone.named_parameters()
        if parameter.requires_grad
    }


def _compare_losses(
    model: torch.nn.Module,
    batches: list[tuple[Any, float]],
    loss_function: Callable[[Any, Any], torch.Tensor],
    device: torch.device,
) -> LossOfTwo | None:
    """Compare the first two micro-batches that have a weight, given with their weights; None: they cannot be joined."""
    chosen = [(batch, weight) for batch, weight in batches if weight > 0][:2]
    if len(chosen) < 2:
        return None

    def loss_of(batch: Any) -> float:
        return float(loss_function(model, operations.send_to_device(batch, device)))

    with torch.no_grad():
        losses, weights = [loss_of(batch) for batch, _ in chosen], [weight for _, weight in chosen]
        try:
            joined = loss_of(operations.concatenate([batch for batch, _ in chosen]))
        except (TypeError, ValueError, RuntimeError, IndexError):
            return None  # sequences of different lengths, or a function for one size of batch
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    return LossOfTwo(mean=mean, total=sum(losses), joined=joined)
