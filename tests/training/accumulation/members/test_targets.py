"""Models that nobody prepared, sharded models, shared optimizers: trained exactly, or refused by name."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, GradientAccumulationPlugin, LocalSGD
from notebook_launcher.training.accumulation.members import parameter_groups
from tests.support.toy_training import (
    Sessions,
    full_gradient,
    make_data,
    make_model,
    numbers,
    one_weight,
    sessions_fixture,
    shards_on_cpus,
    whole,
)

mse = torch.nn.functional.mse_loss


ranks = sessions_fixture(1, 2)


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
    torch.testing.assert_close(grads, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("prepares", ["the optimizer", "the backbone", "the head later"])
def test_models_of_one_optimizer_accumulate_exactly_whatever_was_prepared(prepares):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = make_model()
    backbone, head = model[:2], model[2]
    if prepares == "the optimizer":
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        assert_gradient_of_all(accumulate(accelerator, model, model, optimizer, [2, 1, 3]), 6)
        return
    known = model if prepares == "the backbone" else model[0]
    backbone, optimizer = accelerator.prepare(backbone, torch.optim.SGD(known.parameters(), lr=0.1))
    if prepares == "the head later":
        with accelerator.accumulate(backbone):
            pass  # what belongs to the backbone is looked up
        accelerator.gradient_state.forget_windows()
        optimizer.add_param_group({"params": list(head.parameters())})
    grads = accumulate(accelerator, backbone, lambda inputs: head(backbone(inputs)), optimizer, [2, 1, 3])
    assert_gradient_of_all(grads, 6)


def test_accumulate_refuses_what_was_not_prepared():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.prepare(make_model())
    for target, words in (
        (make_model(), r"accumulate\(Sequential\): none of its parameters belongs to a model, .*copy"),
        (torch.zeros(1, requires_grad=True), r"accumulate\(Tensor\): none of its parameters"),
        (torch.nn.Tanh(), r"accumulate\(Tanh\): no parameters in it. Pass the model that prepare\(\)"),
    ):
        with pytest.raises(ValueError, match=words):
            accelerator.accumulate(target)


def test_overlapping_windows_are_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    left, right = accelerator.prepare(make_model(0), make_model(1))
    inputs, targets = make_data(1)
    with accelerator.accumulate(left):
        accelerator.backward(mse(left(inputs), targets))
    words = r"accumulate\(Sequential, Sequential\): the window of accumulate\(Sequential\) is open, wi"
    with pytest.raises(ValueError, match=words):
        accelerator.accumulate(left, right).__enter__()


def test_window_that_a_break_left_is_dropped_for_another_set_of_models():
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


def optimizer_alone() -> None:
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), make_model()
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.accumulate(model)


def unprepared_head() -> None:
    accelerator, model = Accelerator(cpu=True), make_model()
    backbone, head = model[:2], model[2]
    backbone, optimizer = accelerator.prepare(backbone, torch.optim.SGD(model.parameters(), lr=0.1))
    accumulate(accelerator, backbone, lambda inputs: head(backbone(inputs)), optimizer, [2])


def unfrozen_later() -> None:
    accelerator, model = Accelerator(cpu=True), make_model()
    model[0].requires_grad_(False)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].requires_grad_(True)
    accumulate(accelerator, prepared, prepared, optimizer, [2])


def added_later() -> None:
    accelerator, model = Accelerator(cpu=True), make_model()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(0)  # the same weights on all ranks, whose gradients differ all the same
    model.append(torch.nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    accumulate(accelerator, prepared, prepared, optimizer, [2])


@pytest.mark.parametrize(("mistake", "words"), [
    (optimizer_alone, r"the model was not\. Nothing would synchronise its gradients, and each of the 2"),
    (unprepared_head, r"2 parameters of this SGD \(shapes .*they belong to no model that prepare"),
    (unfrozen_later, "they were frozen, or not yet part of the Sequential, when prepare"),
    (added_later, "they were frozen, or not yet part of the Sequential, when prepare"),
])  # fmt: skip
def test_several_ranks_refuse_what_nothing_would_synchronise(ranks, mistake, words):
    error = ranks.error(2, mistake)
    assert re.search(words, error), error


@shards_on_cpus
@pytest.mark.parametrize("prepared", ["optimizer alone", "both"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_sharded_model_accumulates_exactly(ranks, prepared, wrapped):
    def train(each_batch):
        from torch.distributed.fsdp import fully_shard

        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=each_batch)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model: Any = make_model()
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if prepared == "both":
            model, optimizer = accelerator.prepare(model, optimizer)
            assert not isinstance(model, DistributedDataParallel)
            assert all(group.force_sum_reduction_for_comms for group in parameter_groups(model)), "gloo sums for means"
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
        return updates

    inputs, targets = zip(*(make_data(7, seed=rank) for rank in range(2)), strict=True)
    rows = (torch.cat([each[:4] for each in column]) for column in (inputs, targets))
    expected = full_gradient(make_model().state_dict(), *rows)
    for found in ranks.run(2, lambda: [train(each_batch) for each_batch in (None, True, False)]):
        torch.testing.assert_close(found, [[expected]] * 3, atol=1e-6, rtol=1e-6)


def gradients_of_a_window(kind: str, each_batch: bool | None) -> list[Any]:
    """Return this rank's gradient after each backward of a window; None where FSDP2 holds it back."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=each_batch)
    accelerator, found = Accelerator(cpu=True, gradient_accumulation_plugin=plugin), []
    trained: Any = torch.ones(3, requires_grad=True) if kind == "a leaf tensor" else make_model()
    if kind == "the user's DDP":
        trained = DistributedDataParallel(trained)
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(trained, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    parameters = [trained] if isinstance(trained, torch.Tensor) else list(trained.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    if kind == "the user's DDP":
        accelerator.prepare(optimizer)
    else:
        trained, _ = accelerator.prepare(trained, optimizer)
    for inputs in make_data(3, seed=accelerator.process_index)[0]:
        with accelerator.accumulate(trained):
            accelerator.backward((trained * inputs if kind == "a leaf tensor" else trained(inputs)).sum())
        found.append(None if parameters[0].grad is None else whole([parameters[0].grad])[0])
    return found


AT_THE_END, ALWAYS = [False, False, True], [True, True, True]


@pytest.mark.parametrize(("kind", "each_batch", "reduces"), [
    ("prepared", None, AT_THE_END), ("prepared", True, ALWAYS),
    ("a leaf tensor", None, AT_THE_END), ("a leaf tensor", True, ALWAYS),
    ("the user's DDP", None, ALWAYS), ("the user's DDP", False, ALWAYS),
    pytest.param("sharded", None, ALWAYS, marks=shards_on_cpus),
    pytest.param("sharded", False, AT_THE_END, marks=shards_on_cpus),
])  # fmt: skip
def test_gradients_are_reduced_in_every_micro_batch_or_at_the_windows_end(ranks, kind, each_batch, reduces):
    mine, theirs = ranks.run(2, gradients_of_a_window, kind, each_batch)
    found = [one is not None and torch.equal(one, other) for one, other in zip(mine, theirs, strict=True)]
    assert found == reduces


@pytest.mark.parametrize("name", ["compiled", "container", "old name", ".module"])
def test_no_sync_trigger_sync_and_local_sgd_find_the_model_inside(ranks, name):
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
        told = [own, raw[0].weight.detach().clone()]
        with LocalSGD(accelerator, target, local_sgd_steps=2) as local_sgd:
            for _ in range(2):
                optimizer.zero_grad()
                accelerator.backward(mse(model(inputs), targets))
                optimizer.step()
                local_sgd.step()
                told.append(raw[0].weight.detach().clone())
        return told

    mine, its = ranks.run(2, train)
    assert [torch.equal(*pair) for pair in zip(mine, its, strict=True)] == [False, True, False, True]


# Models that a block trains though `accumulate` was given another one: they belong to its window, too.


STEPS = 2


def train(
    trained: str, order: str, num_samples: int, *, weighs: bool, shares: bool = False
) -> list[tuple[float, float, float]]:
    """Return the gradients of the unnamed and of the named model at each update, and their total norm."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    head, encoder, prompt = one_weight(), one_weight(), torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    unnamed = [prompt] if trained == "a tensor" else list(encoder.parameters())
    parts = [[*unnamed, *head.parameters()]] if shares else [unnamed, list(head.parameters())]
    head, encoder, prompt, loader, *optimizers = accelerator.prepare(
        head, encoder, prompt, numbers(num_samples, 2), *(torch.optim.SGD(part, lr=0.0) for part in parts)
    )
    both, found = [*unnamed, *head.parameters()], []
    for batch in loader:
        with accelerator.accumulate(head):
            if order == "clear, backward, step":
                for optimizer in optimizers:
                    optimizer.zero_grad()
            loss = head(batch * prompt if trained == "a tensor" else encoder(batch)).mean()
            accelerator.backward(loss, weight=len(batch) if weighs else None)
            norm = accelerator.clip_grad_norm_(both, 1e9) if order == "at the end" else None
            if accelerator.sync_gradients or order != "at the end":
                for optimizer in optimizers:
                    optimizer.step()
            if accelerator.sync_gradients:
                gradients = [parameter.grad.item() for parameter in both]
                found.append(
                    (*gradients, sum(gradient**2 for gradient in gradients) ** 0.5 if norm is None else norm.item())
                )
            if accelerator.sync_gradients or order == "backward, step, clear":
                for optimizer in optimizers:
                    optimizer.zero_grad()
    return found


def means(num_ranks: int, num_samples: int) -> list[float]:
    """Return the mean of the samples of each update; the last round is completed from the start of the epoch."""
    samples = [float(number) for number in range(1, num_samples + 1)]
    batches = [samples[at : at + 2] for at in range(0, num_samples, 2)]
    if num_ranks == 2:
        samples += samples[: -num_samples % 4]
        batches = [samples[at : at + 2] for at in range(0, len(samples), 2)]
    size = num_ranks * STEPS
    windows = [list(itertools.chain(*batches[at : at + size])) for at in range(0, len(batches), size)]
    return [sum(window) / len(window) for window in windows]


ORDERS = ["backward, step, clear", "clear, backward, step", "at the end"]


@pytest.mark.parametrize(
    ("num_ranks", "trained", "shares"), [(1, "a tensor", True), (2, "a model", False), (2, "a tensor", True)]
)
def test_unnamed_model_has_the_gradient_of_the_whole_window(
    ranks: Sessions, num_ranks: int, trained: str, *, shares: bool
) -> None:
    """Also if it shares its optimizer with the named one."""
    cases = list(itertools.product(ORDERS, [8, 7, 13], [False, True]))

    def train_all() -> list[list[tuple[float, float, float]]]:
        return [train(trained, order, number, weighs=weighs, shares=shares) for order, number, weighs in cases]

    for results in ranks.run(num_ranks, train_all):
        for case, found in zip(cases, results, strict=True):
            expected = [(mean, mean, mean * 2**0.5) for mean in means(num_ranks, case[1])]
            assert found == [pytest.approx(numbers, abs=1e-9) for numbers in expected], case


def test_gradients_that_no_step_uses_may_be_cleared_inside_a_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    critic, maker = one_weight(), one_weight()
    optimizers = torch.optim.SGD(critic.parameters(), lr=0.0), torch.optim.SGD(maker.parameters(), lr=0.0)
    critic, maker, of_critic, of_maker = accelerator.prepare(critic, maker, *optimizers)
    with accelerator.accumulate(maker):
        accelerator.backward(critic(maker(torch.ones(1, 1, dtype=torch.float64))).mean())
        of_maker.step()
        of_maker.zero_grad()
        of_critic.zero_grad()
    assert critic.weight.grad is None
    assert maker.weight.grad.item() == pytest.approx(1 / STEPS)


# `LocalSGD`: each rank's gradients are means over its own samples, however many the other ranks have.


def gradients(num_samples: int, num_steps: int, *, weighs: bool) -> list[float]:
    accelerator = Accelerator(cpu=True, even_batches=False, gradient_accumulation_steps=num_steps)
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, numbers(num_samples, 2))
    found = []
    with LocalSGD(accelerator, model, local_sgd_steps=100) as local:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean(), weight=len(batch) if weighs else None)
                if accelerator.sync_gradients:
                    found.append(next(model.parameters()).grad.item())
                optimizer.step()
                optimizer.zero_grad()
            local.step()
    return found


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize(("num_samples", "num_steps", "expected"), [
    (8, 1, [[1.5, 5.5], [3.5, 7.5]]),
    (7, 1, [[1.5, 5.5], [3.5, 7.0]]),
    (6, 1, [[1.5, 5.5], [3.5, 0.0]]),  # Rank 1 has no second batch.
    (7, 2, [[3.5], [14 / 3]]),
    (11, 2, [[3.5, 9.5], [5.5, 11.0]]),
])  # fmt: skip
def test_local_gradient_is_the_mean_over_the_ranks_own_samples(
    ranks: Sessions, num_samples: int, num_steps: int, expected: list[list[float]], *, weighs: bool
) -> None:
    found = ranks.run(2, lambda: gradients(num_samples, num_steps, weighs=weighs))
    assert [pytest.approx(mine, abs=1e-5) for mine in expected] == list(found)
