"""A prepared model and its data, for tests of windows in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator
from tests.support.toy_training import full_gradient, make_data, make_model

mse = torch.nn.functional.mse_loss


class Training:
    """A prepared model with its optimizer, and data to feed it."""

    def __init__(self, steps: int | None = 4, num_samples: int = 8, batch_size: int = 1, **options) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
        self.inputs, self.targets = make_data(num_samples)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(self.inputs, self.targets), batch_size)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def loss(self, *rows: int) -> torch.Tensor:
        picked = list(rows)
        return mse(self.model(self.inputs[picked]), self.targets[picked])

    def backward(self, *rows: int, **options: Any) -> None:
        """Compute one micro-batch without a step."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.loss(*rows), **options)

    def micro_batch(self, *rows: int) -> bool:
        """Compute one micro-batch; return whether its window ended."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.loss(*rows))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.accelerator.sync_gradients

    def grads(self) -> list[torch.Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def expect_gradient_of(self, *rows: int) -> None:
        expected = full_gradient(self.model.state_dict(), self.inputs[list(rows)], self.targets[list(rows)])
        torch.testing.assert_close(self.grads(), expected, atol=1e-6, rtol=1e-6)
