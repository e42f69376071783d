"""The correction of a window's gradients, once it is known what the window held.

On a CPU its factor is a number. If the ranks' weights were reduced on a GPU, the factor stays a tensor there, because
reading it would make the program wait for all queued work, once for each update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from notebook_launcher.training.spread_tensors import part_of_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["keep_or_read", "ratio", "rescale"]


def keep_or_read(total: torch.Tensor) -> float | torch.Tensor:
    """Return a reduced total of one element: a number if that needs no wait, otherwise a tensor."""
    return float(total) if total.device.type == "cpu" else total.squeeze()


def ratio(numerator: float | torch.Tensor, total: float | torch.Tensor, otherwise: float) -> float | torch.Tensor:
    """Return `numerator / total`, or `otherwise` if the total is 0."""
    if isinstance(total, torch.Tensor):
        return torch.where(total == 0, otherwise, numerator / total)
    return numerator / total if total else otherwise


def rescale(
    parameters: Iterable[torch.Tensor], factor: float | torch.Tensor, old: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Multiply the gradients of parameters by a factor, each once.

    Args:
        parameters: The parameters.
        factor: The factor.
        old: By the id of a parameter, a part of its gradient that stays as it is.
    """
    if not isinstance(factor, torch.Tensor) and factor == 1.0:
        return
    # By id, so that a gradient of several models is multiplied once. A sharded gradient is represented by this rank's
    # part, because torch refuses whole and sharded tensors in one call.
    found = {id(parameter): part_of_gradient(parameter.grad) for parameter in parameters if parameter.grad is not None}
    gradients = list(found.values())
    if isinstance(factor, torch.Tensor):
        apart = [gradient for gradient in gradients if not _fits(gradient, factor)]
        gradients = [gradient for gradient in gradients if _fits(gradient, factor)]
        for gradient in apart:
            exact = torch.promote_types(gradient.dtype, torch.float32)
            gradient.copy_(gradient.to(exact).mul_(factor.to(gradient.device)))
    if gradients:
        torch._foreach_mul_(gradients, factor)
    for key, part in (old or {}).items():
        if key in found:
            found[key].add_(part * (1.0 - factor))


def _fits(gradient: torch.Tensor, factor: torch.Tensor) -> bool:
    # torch would round the factor to the 16 bits of the gradient first.
    return gradient.device == factor.device and gradient.dtype.itemsize >= 4
