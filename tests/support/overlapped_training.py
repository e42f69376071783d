"""A training whose exchanges may go on beside the next forward, compared with the same training without that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.support.toy_training import make_model

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Training", "alike", "flat", "trained"]


class Training:
    """A training with the option or without it, one window for each call of `update`."""

    def __init__(
        self, model: torch.nn.Module | None = None, *, overlaps: bool = True, cap: float = 1e-5, **options: Any
    ) -> None:
        from notebook_launcher import Accelerator, DistributedDataParallelKwargs

        handler = DistributedDataParallelKwargs(bucket_cap_mb=cap, overlap_with_forward=overlaps)
        options.setdefault("check_ranks", False)  # An update at which ranks compare does not wait.
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], **options)
        self.original: Any = make_model() if model is None else model
        self.kept = list(self.original.parameters())
        """Parameters in a list of the user's own."""
        self.raw = torch.optim.SGD(self.kept, lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(self.original, self.raw)
        self.number = 0

    def loss(self, model: Any = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * self.number + self.accelerator.process_index)
        self.number += 1
        outputs: torch.Tensor = (model or self.model)(torch.rand(2, 3, generator=generator))
        return outputs.square().mean()

    def backward(self) -> None:
        self.accelerator.backward(self.loss())

    def update(self, *, clears: bool = True) -> None:
        self.backward()
        self.optimizer.step()
        if clears:
            self.optimizer.zero_grad()

    @property
    def waits(self) -> bool:
        """True if the update of any parameter waits."""
        return any(parameter.numel() == 0 for parameter in self.kept)

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.original.state_dict().values()]


def trained(*, overlaps: bool, **options: Any) -> Training:
    """Return a training after two windows; with the option, the second update waits."""
    training = Training(overlaps=overlaps, **options)
    training.update()
    training.update()
    assert training.waits == overlaps
    return training


def flat(value: Any) -> Any:
    """Return tensors as numbers."""
    return torch.utils._pytree.tree_map(lambda one: one.tolist() if isinstance(one, torch.Tensor) else one, value)


def both(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return what a function of the option returns with and without it, as plain data."""
    return flat(function(*args, overlaps=True)), flat(function(*args, overlaps=False))


def alike(ranks: Any, function: Callable[..., Any], *args: Any) -> None:
    for found, expected in ranks.run(2, both, function, *args):
        assert found == expected
