"""Weights that `backward` is given as tensors of a device: the same gradients as by numbers, and no read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import Accelerator
from notebook_launcher.training.accumulation import weighing
from notebook_launcher.training.accumulation.weighing import checked_weight, stays_on_device
from tests.support.toy_training import sessions_fixture

if TYPE_CHECKING:
    from tests.support.toy_training import Sessions

ranks = sessions_fixture(1, 2)
COUNTS = ([3.0, 1.0, 0.0, 5.0, 2.0, 0.0], [4.0, 0.0, 0.0, 1.0, 7.0, 2.0])
"""Weights of each rank's micro-batches: two windows of three."""


def train(*, keeps: bool, reduction: str, state_after: int | None = None) -> list[list[float]]:
    """Return the gradients of all updates; `keeps`: weights stay tensors, as those of a GPU do."""
    before = weighing.stays_on_device
    weighing.stays_on_device = lambda weight, device: keeps and isinstance(weight, torch.Tensor)
    try:
        return _train(reduction, state_after)
    finally:
        weighing.stays_on_device = before


def _train(reduction: str, state_after: int | None) -> list[list[float]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, check_ranks=False)
    torch.manual_seed(accelerator.process_index)
    model: Any = torch.nn.Linear(2, 1, dtype=torch.float64)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    gradients = []
    for number, count in enumerate(COUNTS[accelerator.process_index]):
        with accelerator.accumulate(model):
            losses = model(torch.randn(4, 2, dtype=torch.float64)).square()
            loss = losses.mean() if reduction == "mean" else losses.sum() * count
            accelerator.backward(loss, weight=torch.tensor(count), reduction=reduction)
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.flatten().tolist() if hasattr(model, "weight") else _of(model))
            optimizer.step()
            optimizer.zero_grad()
        if number == state_after:
            state = accelerator.gradient_state.state_dict()
            accelerator.gradient_state.load_state_dict(state)
            assert all(isinstance(window["weight"], float) for window in state["windows"])
    return gradients


def _of(model: Any) -> list[float]:
    return [float(number) for number in model.module.weight.grad.flatten()]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_on_a_device_give_the_gradients_of_numbers(ranks: Sessions, num_ranks: int, reduction: str) -> None:
    expected = ranks.run(num_ranks, lambda: train(keeps=False, reduction=reduction))
    found = ranks.run(num_ranks, lambda: train(keeps=True, reduction=reduction))
    assert len(found[0]) == 2
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-14)


def test_open_window_is_saved_with_its_weight_as_a_number(ranks: Sessions) -> None:
    found = ranks.run(1, lambda: train(keeps=True, reduction="mean", state_after=1))
    assert found == ranks.run(1, lambda: train(keeps=False, reduction="mean"))


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_weight_that_cannot_be_is_an_error_as_a_number_and_nan_on_a_device(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"weight=.* must be 0 or more: the number of samples or tokens"):
        checked_weight(torch.tensor(weight), torch.device("cpu"))
    monkeypatch.setattr(weighing, "stays_on_device", lambda *_: True)
    kept = checked_weight(torch.tensor(weight), torch.device("cpu"))
    assert isinstance(kept, torch.Tensor)
    assert kept.isnan()


def test_weights_of_sparse_gradients_are_numbers() -> None:
    """Rows of a micro-batch of weight 0 are left out of sparse gradients, which takes the number."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1), torch.ones(1, requires_grad=True))
    assert not weighing.has_sparse_gradients(accelerator._prepared.members.models_and_leaves)
    accelerator.prepare(torch.nn.Sequential(torch.nn.Embedding(2, 2, sparse=True)))
    assert weighing.has_sparse_gradients(accelerator._prepared.members.models_and_leaves)
    meta = torch.empty((), device="meta")
    assert stays_on_device(meta, torch.device("meta"))
    with pytest.raises(TypeError, match="is not a number"):
        checked_weight(meta, torch.device("meta"), reads=True)


def test_tensor_of_another_device_or_of_several_elements_is_read() -> None:
    assert not stays_on_device(torch.ones(()), torch.device("cpu"))
    assert not stays_on_device(torch.ones(()), torch.device("meta"))
    assert not stays_on_device(torch.ones(2, device="meta"), torch.device("meta"))
    assert not stays_on_device(3, torch.device("cuda"))
