"""Prepared objects that are pickled or copied after use: the copies train on by themselves, as the originals would."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator
from tests.support.toy_training import make_data, make_model

if TYPE_CHECKING:
    from collections.abc import Callable

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda objects: pickle.loads(pickle.dumps(objects)),
    "cloudpickle": lambda objects: pickle.loads(cloudpickle.dumps(objects)),
    "deepcopy": copy.deepcopy,
}


def used(accelerator: Any = None) -> tuple[Any, ...]:
    """Return an Accelerator and what it prepared, after an epoch of three updates."""
    accelerator = accelerator or Accelerator(cpu=True, gradient_accumulation_steps=2, max_grad_norm=0.5)
    model = make_model()
    loader = DataLoader(TensorDataset(*make_data(10)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    objects = accelerator, *accelerator.prepare(model, optimizer, loader)
    assert train(*objects) == 3
    return objects


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> int:
    """Train for an epoch; return the number of updates."""
    updates = 0
    for inputs, wanted in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            optimizer.step()
            optimizer.zero_grad()
            updates += accelerator.sync_gradients
    return updates


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_used_objects_train_on_like_the_originals(way: str) -> None:
    objects = used()
    before = [parameter.detach().clone() for parameter in objects[1].parameters()]
    copies = COPIES[way](objects)
    assert train(*copies) == 3
    assert all(torch.equal(*pair) for pair in zip(objects[1].parameters(), before, strict=True))
    assert train(*objects) == 3
    torch.testing.assert_close(copies[1].state_dict(), objects[1].state_dict(), rtol=0, atol=0)
    assert not torch.equal(next(objects[1].parameters()), before[0])
    used(COPIES[way](objects[0]))  # A copy of an Accelerator alone prepares and trains, too.


@pytest.mark.filterwarnings("ignore:Seems like")  # Torch's mark on a scheduler's optimizer is not copied.
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_an_optimizer_and_a_scheduler_alone_wait_for_no_window(way: str) -> None:
    accelerator, _, optimizer, _ = used()
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5))
    alone = COPIES[way](optimizer)
    torch.testing.assert_close(alone.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    alone.step()
    later = COPIES[way](scheduler)
    assert later.get_last_lr() == [0.1]
    later.step()
    assert (later.get_last_lr(), scheduler.get_last_lr()) == ([0.05], [0.1])
