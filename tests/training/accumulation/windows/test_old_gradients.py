"""Gradients that are there before a window: layers whose optimizer steps in every second window gather over both."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator
from tests.support.toy_training import sessions_fixture

if TYPE_CHECKING:
    from tests.support.toy_training import Sessions

opened = sessions_fixture(1, 2)
NUM_BATCHES = 7
BATCH_SIZE = 3


def squared(model: Any, inputs: torch.Tensor, targets: torch.Tensor, tokens: torch.Tensor) -> Any:
    """Return a mean over tokens."""
    return ((model(inputs) - targets).square().squeeze(1) * tokens).sum() / tokens.sum()


def errors(slow: int, num_steps: int, *, has_weights: bool) -> list[float]:
    """Train with one optimizer for each layer, of which one steps in every second window; return the errors.

    Args:
        slow: The layer whose optimizer steps in every second window.
        num_steps: Micro-batches of a window; 7 of them are in the data.
        has_weights: Pass `weight=`; otherwise the loader counts samples.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    generator = torch.Generator().manual_seed(0)
    num_samples = NUM_BATCHES * BATCH_SIZE * accelerator.num_processes
    inputs, targets = (torch.randn(num_samples, size, generator=generator, dtype=torch.float64) for size in (4, 1))
    tokens = torch.ones(num_samples, dtype=torch.float64)
    if has_weights:
        tokens = torch.randint(1, 9, (num_samples,), generator=generator).double()
    torch.manual_seed(1)
    reference: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)).double()
    raw: Any = copy.deepcopy(reference)
    loader = DataLoader(TensorDataset(inputs, targets, tokens), BATCH_SIZE)
    model, loader, *optimizers = accelerator.prepare(raw, loader, *make_optimizers(raw))
    references = make_optimizers(reference)

    found, begin, num_windows = [], 0, 0
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = squared(model, *batch)
            accelerator.backward(loss, weight=batch[2].sum() if has_weights else None)
            num_windows += accelerator.sync_gradients
            stepping = [1 - slow, slow] if num_windows % 2 == 0 else [1 - slow]
            if accelerator.sync_gradients:
                end = number * BATCH_SIZE * accelerator.num_processes
                squared(reference, inputs[begin:end], targets[begin:end], tokens[begin:end]).backward()
                begin = end
                mine, exact = raw[slow].weight.grad, reference[slow].weight.grad
                found.append(((mine - exact).norm() / exact.norm()).item())
                for at in stepping:
                    references[at].step()
                    references[at].zero_grad()
            for at in stepping:
                optimizers[at].step()
                optimizers[at].zero_grad()
    return found


def make_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]


@pytest.mark.parametrize(
    ("num_processes", "num_steps", "has_weights", "slow"), [(2, 4, False, 0), (1, 1, True, 1), (2, 2, True, 1)]
)
def test_correction_of_a_window_leaves_gradients_from_before_as_they_are(
    opened: Sessions,
    num_processes: int,
    num_steps: int,
    has_weights: bool,
    slow: int,
) -> None:
    def train() -> tuple[list[float], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return errors(slow, num_steps, has_weights=has_weights), [str(one.message) for one in caught]

    for found, messages in opened.run(num_processes, train):
        assert len(messages) == (num_steps > 1 and slow == 0)
        assert all(message.startswith("a window began with gradients that") for message in messages)
        assert len(found) == -(-NUM_BATCHES // num_steps)
        assert max(found) < 1e-12
