"""The gradient of an update is that of the full batch, however the data are cut."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_launcher import Accelerator, DataLoaderConfiguration
from tests.support.toy_training import full_gradient, make_data, make_model, sessions_fixture

mse = torch.nn.functional.mse_loss
RANKS = st.integers(1, 4)
STEPS = st.integers(1, 5)
MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


ranks = sessions_fixture(1, 2, 3, 4)


def train(loader_kind: str, num_samples: int, batch_size: int, steps: int, config: dict[str, Any]) -> list[Any]:
    """Train for an epoch in a rank; return the updates, as `fit` does."""

    class Stream(IterableDataset[Any]):
        def __iter__(self):
            return iter(zip(*make_data(num_samples), strict=True))

    drop_last, shuffle = config.pop("drop_last", False), config.pop("shuffle", False)
    plain_loop = config.pop("plain_loop", False)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(**config)
    )
    dataset = Stream() if loader_kind == "stream" else TensorDataset(*make_data(num_samples))
    loader = accelerator.prepare(DataLoader(dataset, batch_size, drop_last=drop_last, shuffle=shuffle))

    def takes_part() -> bool:
        return bool(loader.current_round.weights[accelerator.process_index])

    updates, left_open = fit(accelerator, loader, takes_part, plain_loop=plain_loop)
    assert not left_open, "the last window was left open"
    return updates


def train_weighted(sizes: list[list[int]], steps: int, reduction: str) -> list[Any]:
    """Train on micro-batches of given sizes, without a loader; the loss is weighed by hand."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    rank = accelerator.process_index
    batches = [make_data(row[rank], seed=17 * number + rank) for number, row in enumerate(sizes)]
    return fit(accelerator, batches, lambda: True, reduction=reduction)[0]


def fit(
    accelerator: Any, batches: Any, takes_part: Any, *, plain_loop: bool = False, reduction: str | None = None
) -> tuple[list[Any], list[Any]]:
    """Return, for each update, the weights before, what was seen, the gradient; and what was seen after the last."""
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = accelerator.unwrap_model(model)
    updates, seen = [], []
    for inputs, targets in batches:
        weighed = {} if reduction is None else {"weight": len(inputs), "reduction": reduction}
        with contextlib.nullcontext() if plain_loop else accelerator.accumulate(model):
            accelerator.backward(mse(model(inputs), targets, reduction=reduction or "mean"), **weighed)
            if takes_part():
                seen.append((inputs, targets))
            if accelerator.sync_gradients:
                state = {name: value.clone() for name, value in inner.state_dict().items()}
                updates.append((state, [parameter.grad.clone() for parameter in inner.parameters()], seen))
                seen = []
            optimizer.step()
            optimizer.zero_grad()
    return updates, seen


def check(results: list[Any]) -> list[float]:
    """Compare every update with the full batch; return the indices of all samples that took part."""
    indices: list[float] = []
    assert len({len(result) for result in results}) == 1, "ranks made different numbers of updates"
    for update in zip(*results, strict=True):
        rows = [pair for rank in update for pair in rank[2]]
        inputs, targets = (torch.cat(column) for column in zip(*rows, strict=True))
        expected = full_gradient(update[0][0], inputs, targets)
        for rank in update:
            torch.testing.assert_close(rank[1], expected, atol=1e-6, rtol=1e-6)
        indices += (inputs[:, -1] * 64).round().tolist()
    return indices


@MANY
@given(num_ranks=RANKS, num_samples=st.integers(1, 24), batch_size=st.integers(1, 4), steps=STEPS, even=st.booleans())
def test_map_style_data_accumulates_exactly(ranks, num_ranks, num_samples, batch_size, steps, even):
    results = ranks.run(num_ranks, train, "map", num_samples, batch_size, steps, {"even_batches": even})
    indices = check(results)
    if not even:
        assert sorted(indices) == list(range(num_samples)), "each sample counts once"


@MANY
@given(
    num_ranks=RANKS, num_samples=st.integers(1, 24), batch_size=st.integers(1, 4), steps=STEPS, dispatch=st.booleans()
)
def test_iterable_data_without_length_accumulates_exactly(ranks, num_ranks, num_samples, batch_size, steps, dispatch):
    results = ranks.run(num_ranks, train, "stream", num_samples, batch_size, steps, {"dispatch_batches": dispatch})
    assert set(check(results)) == set(range(num_samples))


@pytest.mark.parametrize("num_samples", [7, 8, 11])
def test_loop_without_accumulate_is_exact(ranks, num_samples):
    config = {"even_batches": False, "plain_loop": True}
    assert sorted(check(ranks.run(3, train, "map", num_samples, 2, 1, config))) == list(range(num_samples))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("config", [{"shuffle": True}, {"split_batches": True}, {"drop_last": True, "shuffle": True}])
def test_shuffled_split_and_dropped_batches_accumulate_exactly(ranks, num_ranks, config):
    indices = check(ranks.run(num_ranks, train, "map", 25, 6, 3, config))
    assert len(set(indices)) == (24 // (6 * num_ranks) * 6 * num_ranks if config.get("drop_last") else 25)


@MANY
@given(num_ranks=RANKS, data=st.data(), steps=STEPS, reduction=st.sampled_from(["mean", "sum"]))
def test_given_weights_accumulate_exactly(ranks, num_ranks, data, steps, reduction):
    row = st.lists(st.integers(1, 6), min_size=num_ranks, max_size=num_ranks)
    sizes = data.draw(st.lists(row, min_size=steps, max_size=2 * steps))
    check(ranks.run(num_ranks, train_weighted, sizes, steps, reduction))
