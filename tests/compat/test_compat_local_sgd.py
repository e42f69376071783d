"""Local SGD: ranks go their own way between averages, by both sets of rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.toy_training import make_data, make_model, sessions_fixture

OURS = ("notebook_launcher", "notebook_launcher.compat")


ranks = sessions_fixture(1, 2)


def train(library: str, num_steps: int, *, enabled: bool = True, fail: bool = False) -> list[torch.Tensor]:
    """Train five steps, averaging every `num_steps`; return the weights after each, and after the block."""
    import contextlib
    import importlib

    names = importlib.import_module(library)
    home = "accelerate.local_sgd" if library == "accelerate" else "notebook_launcher.compat.local_sgd"
    accelerator = names.Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    told = []

    def weights() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    local_sgd = importlib.import_module(home).LocalSGD(accelerator, model, num_steps, enabled)
    with contextlib.suppress(KeyError), local_sgd:
        for number in range(5):
            inputs, targets = make_data(4, seed=10 * number + accelerator.process_index)
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            told.append(weights())
        if fail:
            raise KeyError
    told.append(weights())
    if library != "notebook_launcher":
        state = importlib.import_module("accelerate.state" if library == "accelerate" else library)
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    return told


@pytest.mark.parametrize(("num_ranks", "library"), [(1, OURS[0]), (2, OURS[0]), (2, OURS[1])])
def test_numbers_are_accelerates(ranks, num_ranks, library):
    for wanted, got in zip(
        ranks.run(num_ranks, train, "accelerate", 2), ranks.run(num_ranks, train, library, 2), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_ranks_agree_after_every_average_alone(ranks):
    first, second = ranks.run(2, train, "notebook_launcher", 2)
    assert [torch.equal(*pair) for pair in zip(first, second, strict=True)] == [False, True, False, True, False, True]
    torch.testing.assert_close(first[5], (first[4] + second[4]) / 2)


def test_without_it_ranks_always_agree_and_one_process_trains_as_ever(ranks):
    def plain() -> Any:
        return train("notebook_launcher", 2, enabled=False)

    first, second = ranks.run(2, plain)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert all(map(torch.equal, ranks.run(1, train, "notebook_launcher", 2)[0], ranks.run(1, plain)[0]))


def test_no_rank_waits_to_average_after_an_error(ranks):
    def fail() -> Any:
        return train("notebook_launcher", 6, fail=True)

    first, second = ranks.run(2, fail)
    assert torch.equal(first[4], first[5])
    assert torch.equal(second[4], second[5])


@pytest.mark.parametrize(("num_steps", "sharded", "message"), [
    (0, False, "local_sgd_steps=0 is too small"),
    (2, True, "fully_shard was applied to this Sequential"),
])  # fmt: skip
def test_local_sgd_refuses_zero_steps_and_sharded_models(ranks, num_steps, sharded, message):
    def refuse() -> None:
        from torch.distributed.fsdp import fully_shard

        from notebook_launcher import Accelerator
        from notebook_launcher.compat import LocalSGD

        accelerator, model = Accelerator(cpu=True), make_model()
        if sharded:
            fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match=message):
            LocalSGD(accelerator, accelerator.prepare(model), num_steps)

    ranks.run(2, refuse)
