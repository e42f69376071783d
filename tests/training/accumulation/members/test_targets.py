"""Models that nobody prepared, sharded models, shared optimizers: trained exactly, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_launcher import Accelerator, GradientAccumulationPlugin, LocalSGD
from tests.support.toy_training import (
    full_gradient,
    make_data,
    make_model,
    sessions_fixture,
    shards_on_cpus,
)

mse = torch.nn.functional.mse_loss


ranks = sessions_fixture(2, 3)


def accumulate(accelerator: Any, target: Any, call: Any, optimizer: Any, sizes: list[int]) -> list[torch.Tensor]:
    """Compute micro-batches of these sizes with a step in each; return the last gradients before the step."""
    at, grads = 0, []
    inputs, targets = make_data(sum(sizes))
    for size in sizes:
        rows = slice(at, at + size)
        with accelerator.accumulate(target):
            accelerator.backward(mse(call(inputs[rows]), targets[rows]), weight=size)
            grads = [parameter.grad.clone() for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.step()
            optimizer.zero_grad()
        at += size
    return grads


def assert_gradient_of_all(grads: list[torch.Tensor], num_samples: int) -> None:
    expected = full_gradient(make_model().state_dict(), *make_data(num_samples))
    for mine, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-6)


def test_model_that_was_never_prepared_accumulates_with_its_prepared_optimizer():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = make_model()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    assert_gradient_of_all(accumulate(accelerator, model, model, optimizer, [2, 1, 3]), 6)


def test_accumulate_refuses_what_was_not_prepared():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.prepare(make_model())
    with pytest.raises(
        ValueError, match=r"accumulate\(Sequential\): none of its parameters belongs to a model, .*copy"
    ):
        accelerator.accumulate(make_model())
    with pytest.raises(ValueError, match=r"accumulate\(Tensor\): none of its parameters"):
        accelerator.accumulate(torch.zeros(1, requires_grad=True))
    with pytest.raises(ValueError, match=r"accumulate\(Tanh\): no parameters in it. Pass the model that prepare\(\)"):
        accelerator.accumulate(torch.nn.Tanh())


def test_overlapping_windows_are_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    left, right = accelerator.prepare(make_model(0), make_model(1))
    inputs, targets = make_data(1)
    with accelerator.accumulate(left):
        accelerator.backward(mse(left(inputs), targets))
    with (
        pytest.raises(
            ValueError,
            match=r"accumulate\(Sequential, Sequential\): the window of accumulate\(Sequential\) is open, wi",
        ),
        accelerator.accumulate(left, right),
    ):
        pass


def test_optimizer_of_two_models_does_not_step_while_a_window_is_open():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    left, right = make_model(0), make_model(1)
    both = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1)
    left, right, both = accelerator.prepare(left, right, both)
    inputs, targets = make_data(1)
    with pytest.raises(
        RuntimeError, match=r"this SGD also updates models whose window is still open, with 1 of 2 micr"
    ):
        for model in (left, right, left):
            with accelerator.accumulate(model):
                accelerator.backward(mse(model(inputs), targets))
                both.step()


def test_several_ranks_refuse_a_model_whose_optimizer_alone_was_prepared(ranks):
    def train():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = make_model()
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        with accelerator.accumulate(model):
            pass

    with pytest.raises(
        ValueError, match=r"the model was not\. Nothing would synchronise its gradients, and each of the 2"
    ):
        ranks.run(2, train)


def test_several_ranks_refuse_to_step_an_unprepared_head(ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        model = make_model()
        backbone, head = model[:2], model[2]
        backbone, optimizer = accelerator.prepare(backbone, torch.optim.SGD(model.parameters(), lr=0.1))
        accumulate(accelerator, backbone, lambda inputs: head(backbone(inputs)), optimizer, [2])

    with pytest.raises(RuntimeError, match=r"2 parameters of this SGD \(shapes .*they belong to no model that prepare"):
        ranks.run(2, train)


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_several_ranks_refuse_to_step_parameters_that_came_after_prepare(ranks, how):
    def train():
        accelerator = Accelerator(cpu=True)
        model = make_model()
        if how == "unfrozen":
            model[0].requires_grad_(False)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if how == "unfrozen":
            model[0].requires_grad_(True)
        else:
            torch.manual_seed(0)  # the same weights on all ranks, whose gradients differ all the same
            model.append(torch.nn.Linear(1, 1))
            optimizer.add_param_group({"params": list(model[3].parameters())})
        accumulate(accelerator, prepared, prepared, optimizer, [2])

    with pytest.raises(RuntimeError, match="they were frozen, or not yet part of the Sequential, when prepare"):
        ranks.run(2, train)


@shards_on_cpus
@pytest.mark.parametrize(
    ("prepared", "each_batch", "wrapped"),
    [("optimizer alone", None, False), ("both", None, True), ("both", True, False), ("both", False, True)],
)
def test_sharded_model_accumulates_exactly(ranks, prepared, each_batch, wrapped):
    def train():
        from torch.distributed.fsdp import fully_shard

        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=each_batch)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model: Any = make_model()
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if prepared == "both":
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            optimizer = accelerator.prepare(optimizer)
        updates = []
        inputs, targets = make_data(7, seed=accelerator.process_index)
        at = 0
        for size in (1, 2, 1, 3):
            rows = slice(at, at + size)
            at += size
            with accelerator.accumulate(torch.nn.ModuleList([model]) if wrapped else model):
                accelerator.backward(mse(model(inputs[rows]), targets[rows]), weight=size)
                if accelerator.sync_gradients:
                    updates.append([parameter.grad.full_tensor() for parameter in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        return updates, inputs[:4], targets[:4]

    results = ranks.run(2, train)
    expected = full_gradient(
        make_model().state_dict(),
        torch.cat([result[1] for result in results]),
        torch.cat([result[2] for result in results]),
    )
    for updates, _, _ in results:
        assert len(updates) == 1
        for mine, wanted in zip(updates[0], expected, strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["compiled", "container"])
def test_no_sync_and_trigger_sync_find_the_model_inside(ranks, name):
    def train():
        accelerator = Accelerator(cpu=True)
        raw: Any = make_model()
        model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        target = {
            "compiled": torch.compile(model, backend="eager"),
            "container": torch.nn.ModuleList([model]),
        }[name]
        inputs, targets = make_data(2, seed=accelerator.process_index)
        with accelerator.no_sync(target):
            first, second = mse(model(inputs), targets), mse(model(2 * inputs), targets)
            accelerator.backward(first)
            own = raw[0].weight.grad.clone()
        with accelerator.trigger_sync_in_backward(target):
            accelerator.backward(second)
        optimizer.step()
        return own, raw[0].weight.detach()

    (first, mine), (second, its) = ranks.run(2, train)
    assert not torch.equal(first, second), "no_sync synchronised"
    assert torch.equal(mine, its), "the last backward did not synchronise"


def test_local_sgd_finds_the_model_inside(ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        raw: Any = make_model()
        model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        target = torch.compile(model, backend="eager")
        inputs, targets = make_data(2, seed=accelerator.process_index)
        told = []
        with LocalSGD(accelerator, target, local_sgd_steps=2) as local_sgd:
            for _ in range(2):
                accelerator.backward(mse(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
                told.append(raw[0].weight.detach().clone())
        return told

    (mine, averaged), (its, also) = ranks.run(2, train)
    assert not torch.equal(mine, its), "ranks do not train by themselves"
    assert torch.equal(averaged, also)
