"""A small training with all that a checkpoint holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import OneCycleLR

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.random import set_seed

# ruff: noqa: NPY002 - the legacy generator is the one whose state is kept


class Meter:
    """An object of the user with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Training:
    """A small training: dropout, a leaf tensor, two optimizers, windows of three micro-batches."""

    def __init__(self, seed: int, *, steps: int = 3, **options: Any) -> None:
        set_seed(seed)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
        scale = torch.rand(1, requires_grad=True)
        adam = torch.optim.AdamW(model.parameters(), lr=0.05)
        sgd = torch.optim.SGD([scale], lr=0.1, momentum=0.9)
        schedule = OneCycleLR(adam, max_lr=0.1, total_steps=50)
        self.model, self.scale, self.adam, self.sgd, self.schedule = self.accelerator.prepare(
            model, scale, adam, sgd, schedule
        )
        self.meter = Meter({"losses": [], "best": seed})
        self.accelerator.register_for_checkpointing(self.meter)

    def train(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            inputs = torch.rand(5, 4) * random.random() + float(np.random.random_sample())
            with self.accelerator.accumulate(self.model, self.scale):
                loss = (self.model(inputs) * self.scale).square().mean()
                self.accelerator.backward(loss)
                for optimizer in (self.adam, self.sgd):
                    optimizer.step()
                    optimizer.zero_grad()
                self.schedule.step()
            self.meter.state["losses"].append(loss.item())

    def state(self) -> str:
        """All that it has, down to the last bit."""
        gradients = [
            None if parameter.grad is None else parameter.grad.tolist()
            for parameter in [*self.model.parameters(), self.scale]
        ]
        states = [part.state_dict() for part in (self.model, self.adam, self.sgd, self.schedule, self.meter)]
        return repr(listed((states, self.scale.tolist(), gradients)))

    def everything(self) -> tuple[str, float, float, list[float]]:
        """Its state, and the next numbers drawn in this process."""
        return self.state(), random.random(), float(np.random.random_sample()), torch.rand(3).tolist()


def listed(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.tolist(), str(value.dtype)
        case dict():
            return {name: listed(item) for name, item in value.items()}
        case list() | tuple():
            return [listed(item) for item in value]
    return value
