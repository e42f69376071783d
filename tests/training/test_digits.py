"""A real task: scikit-learn's digits, the same on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest

from notebook_launcher import notebook_launch

GLOBAL_MICRO_BATCHES = 4


def train(epochs: int) -> tuple[float, float]:
    """Return the mean loss of the last epoch and the accuracy on test data.

    In float64: a thousand updates amplify the rounding of float32, in which 4 ranks add up in another order, to some
    per cent of so small a loss.
    """
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    from notebook_launcher import Accelerator, DataLoaderConfiguration, set_seed

    set_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    inputs = torch.from_numpy(digits.data[order]) / 16
    labels = torch.from_numpy(digits.target[order])
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3, even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs[:1437], labels[:1437]), batch_size=16, shuffle=True)
    test_loader = DataLoader(TensorDataset(inputs[1437:], labels[1437:]), batch_size=50)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    losses = []
    for epoch in range(epochs):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(batch), targets, reduction="none")
                accelerator.backward(loss.mean())
                optimizer.step()
                optimizer.zero_grad()
            if epoch == epochs - 1:
                losses.append(accelerator.gather_for_metrics(loss.detach()))
    right = []
    model.eval()
    with torch.no_grad():
        for batch, targets in test_loader:
            right.append(accelerator.gather_for_metrics(model(batch).argmax(1) == targets))
    assert len(torch.cat(losses)) == 1437, "each sample counts once"
    assert len(torch.cat(right)) == 360
    return torch.cat(losses).mean().item(), torch.cat(right).float().mean().item()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_digits_reach_same_accuracy_on_any_number_of_ranks():
    outcomes = {}
    for num_ranks in (1, 2, 4):
        steps = GLOBAL_MICRO_BATCHES // num_ranks
        results = notebook_launch(train, num_ranks, args=(6,), gradient_accumulation_steps=steps, output="none")
        assert len(set(results)) == 1, "ranks disagree on gathered metrics"
        outcomes[num_ranks] = results[0]
    losses = [loss for loss, _ in outcomes.values()]
    assert min(accuracy for _, accuracy in outcomes.values()) >= 0.97, outcomes
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6), outcomes
