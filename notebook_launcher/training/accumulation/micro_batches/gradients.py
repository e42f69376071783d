"""The backward of a loss whose initial gradient is known: calls torch's engine without the checks of `Tensor.backward`.

`Tensor.backward` makes or inspects the initial gradient and parses its arguments: a quarter of a small backward, 21 of
91 µs. A loss of one element and an initial gradient of its own shape leave nothing to inspect, so this module calls
the engine directly. The engine's function has no public name: if torch lacks it, or anything is unusual,
`Tensor.backward` runs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["InitialGradient", "backward", "without_sparse_rows"]


class InitialGradient:
    """The factor of a loss as a tensor, made again only if the factor changes."""

    def __init__(self) -> None:
        self._made: tuple[float, torch.Tensor] | None = None

    def of(self, loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """Return the gradient with which the backward of a loss of one element begins."""
        if isinstance(factor, torch.Tensor):
            return factor.to(loss).expand_as(loss)
        made = self._made
        if made is None or made[0] != factor or made[1].dtype != loss.dtype or made[1].device != loss.device:
            # `torch.tensor` would copy the number to the GPU, and wait for it.
            made = self._made = factor, torch.full((), factor, dtype=loss.dtype, device=loss.device)
        return made[1] if loss.dim() == 0 else made[1].expand_as(loss)


def backward(loss: torch.Tensor, gradient: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Run `loss.backward(gradient=gradient, **kwargs)`."""
    # Looked up at each call, because torch replaces the function while it traces.
    run_engine: Any = getattr(graph, "_engine_run_backward", None)
    is_plain = type(loss) is torch.Tensor and not torch._C._is_torch_function_mode_enabled()  # noqa: SLF001 - as above
    if kwargs or run_engine is None or not is_plain:
        loss.backward(gradient=gradient, **kwargs)  # type: ignore[no-untyped-call]
        return
    keep_graph = create_graph = False
    run_engine((loss,), (gradient,), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def without_sparse_rows(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Leave out the rows of sparse gradients inside the block, which is for a micro-batch without weight.

    All of these rows are 0, and an optimizer such as SparseAdam moves every row that a gradient names.
    """
    trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad and parameter.is_leaf]
    handles = [parameter.register_hook(_no_rows) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _no_rows(gradient: torch.Tensor) -> torch.Tensor | None:
    if not gradient.is_sparse:
        return None
    indices, values = gradient._indices()[:, :0], gradient._values()[:0]  # noqa: SLF001 - others need it coalesced
    return torch.sparse_coo_tensor(indices, values, gradient.size(), check_invariants=False)
