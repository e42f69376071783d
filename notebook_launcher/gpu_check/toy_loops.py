"""The small models and loops that the checks train, in ranks."""

from __future__ import annotations

from typing import Any

__all__ = ["make_batches", "make_toy_model", "mean_loss", "train"]

WIDTH = 64


def make_toy_model(seed: int = 0) -> Any:
    """Return a small network with the same weights at every call."""
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def make_batches(sizes: list[int], seed: int = 1) -> list[tuple[Any, Any]]:
    """Return batches of these sizes, on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    return [(inputs, inputs.sum(1, keepdim=True)) for inputs in rows]


def mean_loss(model: Any, batch: Any) -> Any:
    """Return the mean squared error of a batch."""
    inputs, targets = batch
    return (model(inputs) - targets).square().float().mean()


def train(num_updates: int = 8, *, steps: int = 2, fused: bool = False, **options: Any) -> Any:
    """Train with an Accelerator; return the weights on the CPU, and the number of skipped updates."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from notebook_launcher import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    (rows,) = make_batches([16 * num_updates * steps])
    model: Any = make_toy_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    loader: Any = DataLoader(TensorDataset(*rows), batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_skipped = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            optimizer.step()
            num_skipped += accelerator.sync_gradients and optimizer.step_was_skipped
            optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    return weights, num_skipped
