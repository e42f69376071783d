"""Models that nobody prepared, sharded models, shared optimizers: trained exactly, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_launcher import Accelerator
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


def test_gradients_of_an_unprepared_head_are_corrected_with_those_of_its_backbone():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = make_model()
    backbone, head = model[:2], model[2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backbone, optimizer = accelerator.prepare(backbone, optimizer)
    grads = accumulate(accelerator, backbone, lambda inputs: head(backbone(inputs)), optimizer, [2, 1, 3])
    assert_gradient_of_all(grads, 6)


def test_parameter_group_added_later_belongs_to_the_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = make_model()
    backbone, head = model[:2], model[2]
    backbone, optimizer = accelerator.prepare(backbone, torch.optim.SGD(model[0].parameters(), lr=0.1))
    with accelerator.accumulate(backbone):
        pass  # what belongs to the backbone is looked up
    accelerator.gradient_state.forget_windows()
    optimizer.add_param_group({"params": list(head.parameters())})
    grads = accumulate(accelerator, backbone, lambda inputs: head(backbone(inputs)), optimizer, [2, 1, 3])
    assert_gradient_of_all(grads, 6)


def test_models_that_share_parameters_are_corrected_once():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    twin = torch.nn.Sequential(*model)  # other modules around the same parameters
    model, twin = accelerator.prepare(model, twin)
    inputs, targets = make_data(5)
    for rows in (slice(0, 4), slice(4, 5)):
        with accelerator.accumulate(model, twin):
            loss = mse(model(inputs[rows]), targets[rows]) + mse(twin(inputs[rows]), targets[rows])
            accelerator.backward(loss / 2, weight=rows.stop - rows.start)
    assert_gradient_of_all([parameter.grad for parameter in model.parameters()], 5)


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


def test_window_that_a_break_left_is_dropped_for_another_set_of_models():
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    left, right = accelerator.prepare(make_model(0), make_model(1))
    loader = accelerator.prepare(DataLoader(TensorDataset(*make_data(3)), 1))
    for inputs, targets in loader:
        with accelerator.accumulate(left):
            accelerator.backward(100 * mse(left(inputs), targets))
        break
    with pytest.warns(UserWarning, match="a window of 3 micro-batches was left after 1"):
        for inputs, targets in loader:
            with accelerator.accumulate(left, right):
                accelerator.backward(mse(left(inputs), targets) + mse(right(inputs), targets))
    assert_gradient_of_all([parameter.grad for parameter in left.parameters()], 3)


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


def sharded_parameters(model: torch.nn.Module) -> list[Any]:
    return list(model.parameters())


@shards_on_cpus
@pytest.mark.parametrize("prepared", ["optimizer alone", "both"])
@pytest.mark.parametrize("each_batch", [None, True, False])
@pytest.mark.parametrize("wrapped", [False, True])
def test_sharded_model_accumulates_exactly(ranks, prepared, each_batch, wrapped):
    def train():
        from torch.distributed.fsdp import fully_shard

        from notebook_launcher import GradientAccumulationPlugin

        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=each_batch)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model = make_model()
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
                    updates.append([parameter.grad.full_tensor() for parameter in sharded_parameters(model)])
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


@pytest.mark.parametrize("name", ["compiled", "container", "old name", ".module"])
def test_no_sync_and_trigger_sync_find_the_model_inside(ranks, name):
    def train():
        accelerator = Accelerator(cpu=True)
        raw: Any = make_model()
        model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        target = {
            "compiled": torch.compile(model, backend="eager"),
            "container": torch.nn.ModuleList([model]),
            "old name": raw,
            ".module": model.module,
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


@pytest.mark.parametrize("name", ["compiled", "old name"])
def test_local_sgd_finds_the_model_inside(ranks, name):
    def train():
        from notebook_launcher import LocalSGD

        accelerator = Accelerator(cpu=True)
        raw: Any = make_model()
        model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        target = torch.compile(model, backend="eager") if name == "compiled" else raw
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
