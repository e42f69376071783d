"""Whoever reads weights or gradients while they are exchanged has the right ones: each read finishes the exchange."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.overlapped_training import Training, flat, trained
from tests.support.toy_training import make_exchange_group, make_model, sessions_fixture

if TYPE_CHECKING:
    from collections.abc import Callable

ranks = sessions_fixture(2, set_up=make_exchange_group)


READS: dict[str, Callable[[Training], Any]] = {
    "state_dict": lambda training: training.model.state_dict(),
    "state_dict of a part": lambda training: training.original[0].state_dict(),
    "parameters": lambda training: [parameter.clone() for parameter in training.model.parameters()],
    "an attribute": lambda training: training.original[2].weight.clone(),
    "get_state_dict": lambda training: training.accelerator.get_state_dict(training.model),
    "unwrap_model": lambda training: training.accelerator.unwrap_model(training.model).state_dict(),
    "deepcopy": lambda training: copy.deepcopy(training.original).state_dict(),
    "pickle": lambda training: pickle.loads(pickle.dumps(training.original)).state_dict(),
    "pickle of the prepared model": lambda training: pickle.loads(pickle.dumps(training.model)).module.state_dict(),
    "pickle of the optimizer": lambda training: pickle.loads(pickle.dumps(training.optimizer)).param_groups[0][
        "params"
    ],
    "state of the optimizer": lambda training: list(training.optimizer.state.values()),
    "state_dict of the optimizer": lambda training: training.optimizer.state_dict()["state"],
    "evaluation": lambda training: evaluate(training, torch.inference_mode()),
    "a forward past the prepared model": lambda training: training.loss(training.original).detach(),
    "functional_call": lambda training: torch.func.functional_call(
        training.original, dict(training.original.named_parameters()), torch.ones(1, 3)
    ).detach(),
    "evaluation without gradients": lambda training: evaluate(training, torch.no_grad()),
    "an average of weights": lambda training: averaged(training, make_model()),
    "finish_exchange": lambda training: after(training, training.accelerator.finish_exchange),
    "free_memory": lambda training: after(training, training.accelerator.free_memory),
    "end_training": lambda training: after(training, training.accelerator.end_training),
    "another dtype": lambda training: training.original.double().state_dict(),
}


def evaluate(training: Training, context: Any) -> torch.Tensor:
    training.model.eval()
    with context:
        return training.loss().clone()


def averaged(training: Training, model: torch.nn.Module) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(training.original)
    return average.module.state_dict()


def after(training: Training, method: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the parameters that the user holds, after a method that finishes the exchange."""
    method()
    assert not training.waits
    return [parameter.detach().clone() for parameter in training.kept]


def read_both(name: str) -> tuple[bytes, bytes]:
    """Return what a read sees after two windows, with and without the option, and train on."""
    seen = []
    for overlaps in (True, False):
        training = trained(overlaps=overlaps)
        found = READS[name](training)
        found = {"seen": found, "left": training.weights()}
        if name not in ("free_memory", "another dtype"):
            training.model.train()
            training.update()
            found["next"] = training.weights()
        seen.append(pickle.dumps(flat(found)))
    return seen[0], seen[1]


@pytest.mark.parametrize("name", READS)
def test_reads_of_weights_make_the_update_first(ranks, name):
    for found, expected in ranks.run(2, read_both, name):
        assert found == expected


GRADIENT_READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda gradient: gradient.clone(),
    "norm": lambda gradient: gradient.norm(),
    "numpy": lambda gradient: gradient.numpy().copy(),
    "tolist": lambda gradient: gradient.tolist(),
    "repr": repr,
    "pickle": lambda gradient: pickle.loads(pickle.dumps(gradient)),
    "deepcopy": copy.deepcopy,
    "item": lambda gradient: gradient.reshape(-1)[0].item(),
    "data": lambda gradient: gradient.data.clone(),
    "data_ptr": lambda gradient: (gradient.data_ptr(), gradient.clone())[1],
    "storage": lambda gradient: gradient.untyped_storage().tolist(),
    "written in place": lambda gradient: gradient.mul_(3).clone(),
    "foreach": lambda gradient: torch._foreach_norm([gradient])[0],
}


def read_gradients(name: str, *, after_step: bool) -> tuple[Any, Any]:
    """Read the gradients of the second window with and without the option; return both, with the weights."""
    seen = []
    for overlaps in (True, False):
        training = Training(overlaps=overlaps)
        training.update()
        if after_step:
            training.update(clears=False)
        else:
            training.backward()
        found = [GRADIENT_READS[name](parameter.grad) for parameter in training.kept]
        if not after_step:
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.update()
        seen.append(flat([found, training.weights()]))
    return pickle.dumps(seen[0]), pickle.dumps(seen[1])


@pytest.mark.parametrize("after_step", [False, True])
@pytest.mark.parametrize("name", GRADIENT_READS)
def test_reads_of_gradients_finish_the_exchange(ranks, name, after_step):
    for found, expected in ranks.run(2, functools.partial(read_gradients, after_step=after_step), name):
        assert found == expected


def test_returned_models_and_optimizers_have_the_last_update(ranks):
    def train(*, overlaps: bool) -> tuple[Any, Any]:
        training = trained(overlaps=overlaps)
        return training.original, training.raw

    found, wanted = (ranks.run(2, functools.partial(train, overlaps=overlaps)) for overlaps in (True, False))
    for (model, optimizer), (expected, other) in zip(found, wanted, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), expected.parameters(), strict=True))
        states = [list(each.state.values()) for each in (optimizer, other)]
        assert flat(states[0]) == flat(states[1])


def test_weights_past_their_module_are_empty_until_their_update(ranks):
    def train() -> tuple[Any, ...]:
        training = trained(overlaps=True)
        kept = training.kept
        assert [parameter.numel() for parameter in kept] == [0] * len(kept)
        messages = []
        for change in (lambda one: one.clamp_(max=0), lambda one: setattr(one, "data", torch.ones(4, 3))):
            training = trained(overlaps=True)
            with torch.no_grad():
                change(training.kept[0])
            with pytest.raises(RuntimeError) as caught:
                training.loss()
            messages.append(str(caught.value))
        return not training.waits, *messages

    for shown, *messages in ranks.run(2, train):
        assert shown
        for message in messages:
            assert message.startswith(
                "1 parameters of Sequential (shapes (4, 3)) were changed past their module between"
            )
            assert message.endswith("Call accelerator.finish_exchange() before you change them.")
