"""The gradient of an update is that of the full batch, however the data are cut."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.toy_training import full_gradient, make_data, make_model, sessions_fixture

RANKS = st.integers(1, 4)
STEPS = st.integers(1, 5)
MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


ranks = sessions_fixture(1, 2, 3, 4)


def train(loader_kind: str, num_samples: int, batch_size: int, steps: int, config: dict[str, Any]) -> list[Any]:
    """Train for an epoch in a rank; return, for each update, the weights before, what was seen, the gradient."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    from notebook_launcher.training.accelerator import Accelerator
    from notebook_launcher.training.plugins import DataLoaderConfiguration

    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return iter(zip(*make_data(num_samples), strict=True))

    drop_last = config.pop("drop_last", False)
    shuffle = config.pop("shuffle", False)
    plain_loop = config.pop("plain_loop", False)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(**config)
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = Stream() if loader_kind == "stream" else TensorDataset(*make_data(num_samples))
    loader = DataLoader(dataset, batch_size, drop_last=drop_last, shuffle=shuffle)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates, seen = [], []
    for inputs, targets in loader:
        with contextlib.nullcontext() if plain_loop else accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            if loader.current_round.weights[accelerator.process_index]:
                seen.append((inputs, targets))
            if accelerator.sync_gradients:
                updates.append((*weights_and_gradients(accelerator.unwrap_model(model)), seen))
                seen = []
            optimizer.step()
            optimizer.zero_grad()
    assert not seen, "the last window was left open"
    return updates


def weights_and_gradients(model: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return copies of a model's weights, and of the gradients of its parameters."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, [parameter.grad.clone() for parameter in model.parameters()]


def check(results: list[Any], num_ranks: int) -> list[float]:
    """Compare every update with the full batch; return the indices of all samples that took part."""
    indices: list[float] = []
    assert len({len(result) for result in results}) == 1, "ranks made different numbers of updates"
    for update in zip(*results, strict=True):
        rows = [pair for rank in update for pair in rank[2]]
        inputs, targets = (torch.cat(column) for column in zip(*rows, strict=True))
        expected = full_gradient(update[0][0], inputs, targets)
        for rank in update:
            for mine, wanted in zip(rank[1], expected, strict=True):
                torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-6)
        indices += (inputs[:, -1] * 64).round().tolist()
    assert num_ranks == len(results)
    return indices


@MANY
@given(num_ranks=RANKS, num_samples=st.integers(1, 24), batch_size=st.integers(1, 4), steps=STEPS, even=st.booleans())
def test_map_style_data_accumulates_exactly(ranks, num_ranks, num_samples, batch_size, steps, even):
    results = ranks.run(num_ranks, train, "map", num_samples, batch_size, steps, {"even_batches": even})
    indices = check(results, num_ranks)
    if not even:
        assert sorted(indices) == list(range(num_samples)), "each sample counts once"


@MANY
@given(
    num_ranks=RANKS, num_samples=st.integers(1, 24), batch_size=st.integers(1, 4), steps=STEPS, dispatch=st.booleans()
)
def test_iterable_data_without_length_accumulates_exactly(ranks, num_ranks, num_samples, batch_size, steps, dispatch):
    results = ranks.run(num_ranks, train, "stream", num_samples, batch_size, steps, {"dispatch_batches": dispatch})
    assert set(check(results, num_ranks)) == set(range(num_samples))


@pytest.mark.parametrize("num_samples", [7, 8, 11])
def test_loop_without_accumulate_is_exact(ranks, num_samples):
    config = {"even_batches": False, "plain_loop": True}
    assert sorted(check(ranks.run(3, train, "map", num_samples, 2, 1, config), 3)) == list(range(num_samples))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("config", [{"shuffle": True}, {"split_batches": True}, {"drop_last": True, "shuffle": True}])
def test_shuffled_split_and_dropped_batches_accumulate_exactly(ranks, num_ranks, config):
    indices = check(ranks.run(num_ranks, train, "map", 25, 6, 3, config), num_ranks)
    assert len(set(indices)) == (24 // (6 * num_ranks) * 6 * num_ranks if config.get("drop_last") else 25)


def train_weighted(sizes: list[list[int]], steps: int, reduction: str, precision: str) -> list[Any]:
    """Micro-batches of given sizes, without a loader; the loss is weighed by hand."""
    import torch

    from notebook_launcher.training.accelerator import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, mixed_precision=precision)
    model = accelerator.prepare(make_model())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    updates, seen = [], []
    for number, row in enumerate(sizes):
        inputs, targets = make_data(row[accelerator.process_index], seed=17 * number + accelerator.process_index)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets, reduction=reduction)
            accelerator.backward(loss, weight=len(inputs), reduction=reduction)
            seen.append((inputs, targets))
            if accelerator.sync_gradients:
                updates.append((*weights_and_gradients(accelerator.unwrap_model(model)), seen))
                seen = []
            optimizer.step()
            optimizer.zero_grad()
    return updates


@MANY
@given(num_ranks=RANKS, data=st.data(), steps=STEPS, reduction=st.sampled_from(["mean", "sum"]))
def test_given_weights_accumulate_exactly(ranks, num_ranks, data, steps, reduction):
    row = st.lists(st.integers(1, 6), min_size=num_ranks, max_size=num_ranks)
    sizes = data.draw(st.lists(row, min_size=steps, max_size=2 * steps))
    check(ranks.run(num_ranks, train_weighted, sizes, steps, reduction, "no"), num_ranks)
