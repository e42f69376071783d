"""A training whose ranks a test lets diverge, and the words of the errors about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.support.toy_training import make_data, make_model

if TYPE_CHECKING:
    from collections.abc import Callable


class Training:
    """A model that every rank trains on samples of its own."""

    def __init__(self, model: torch.nn.Module | None = None, *, library: str = "notebook_launcher", **options: Any):
        import importlib

        self.accelerator = importlib.import_module(library).Accelerator(cpu=True, **options)
        model = make_model() if model is None else model
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.1, eps=0.1)
        )
        self.rank = self.accelerator.process_index
        self.number = 0

    def step(self, change: Callable[[], object] | None = None) -> None:
        """Make an update, with a change between backward and step."""
        self.number += 1
        with self.accelerator.accumulate(self.model):
            inputs, targets = make_data(2, seed=100 * self.number + self.rank)
            self.accelerator.backward(torch.nn.functional.mse_loss(self.model(inputs), targets))
            if change is not None:
                change()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def steps(self, number: int) -> int:
        """Make several updates; return how many have been made in all."""
        for _ in range(number):
            self.step()
        return self.number

    @property
    def last(self) -> Any:
        """The last parameter."""
        return list(self.model.parameters())[-1]


WEIGHTS = "the weights of Sequential on rank"
ON_0 = "differ from those on rank 0"
