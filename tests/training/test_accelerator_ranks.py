"""An Accelerator on several ranks: its work, and its refusals."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_launcher import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs
from tests.support.toy_training import make_data, make_model, numbers, one_weight

mse = torch.nn.functional.mse_loss


def prepare(steps=1, model=None, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    model = make_model(seed=accelerator.process_index) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs, targets = make_data(4, seed=accelerator.process_index)
    return accelerator, model, optimizer, lambda: mse(model(inputs), targets)


def micro_batch(accelerator, model, optimizer, loss, **options):
    with accelerator.accumulate(model):
        accelerator.backward(value := loss(), **options)
        optimizer.step()
        optimizer.zero_grad()
    return value.detach()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(results):
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=0)


@pytest.mark.parametrize(("steps", "expected"), [(4, [0, 0, 0, 1] * 2), (1, [1] * 8)])
def test_gradients_are_reduced_once_for_each_window(ranks, steps, expected):
    def count():
        accelerator, model, optimizer, loss = prepare(steps)
        group: Any = torch.distributed.group.WORLD
        counts = []
        for _ in range(16):
            before = group._get_sequence_number_for_group()
            micro_batch(accelerator, model, optimizer, loss)
            counts.append(group._get_sequence_number_for_group() - before)
        return counts[8:]  # The first backward of a DDP model also agrees on its buckets.

    assert ranks.run(2, count) == [expected] * 2


def test_leaf_tensors_are_synchronised(ranks):
    def train():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        first = torch.full((2,), float(accelerator.process_index), requires_grad=True)
        second = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([first, second], lr=1.0)
        same, second, optimizer = accelerator.prepare(first, second, optimizer)
        assert same is first
        assert first[0] == 0, "rank 0's value"
        for number in range(2):
            with accelerator.accumulate(first, second):
                share = (accelerator.process_index + 1) * (number + 1)
                accelerator.backward((first * share).sum() + (second * share).sum())
                optimizer.step()
        return first.tolist(), second.tolist()

    # The mean of 1, 2, 2 and 4.
    assert ranks.run(2, train) == [([-2.25] * 2, [1 - 2.25] * 3)] * 2


@pytest.mark.parametrize(("steps", "accumulates"), [(1, False), (1, True), (3, True)])
def test_optimizers_of_one_model_step_and_clear_in_turns(ranks, steps, accumulates):
    """`a` and `b` are the steps of the two optimizers, `A` and `B` their `zero_grad`."""

    def train(order):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        model = make_model().double()
        parts = [[*model.parameters()][:1], [*model.parameters()][1:]]
        made = [torch.optim.AdamW(parts[0], lr=0.05), torch.optim.SGD(parts[1], lr=0.05)]
        model, *optimizers = accelerator.prepare(model, *made)
        data = [[tensor.double() for tensor in make_data(4, seed=seed)] for seed in range(12)]
        for at in range(6):
            inputs, targets = data[2 * at + accelerator.process_index]
            with accelerator.accumulate(model) if accumulates else contextlib.nullcontext():
                accelerator.backward(mse(model(inputs), targets))
                for act in order:
                    optimizer = optimizers[act.lower() == "b"]
                    optimizer.step() if act.islower() else optimizer.zero_grad()
        return weights(accelerator.unwrap_model(model))

    def by_hand():
        model = make_model().double()
        first, *others = model.parameters()
        optimizers = [torch.optim.AdamW([first], lr=0.05), torch.optim.SGD(others, lr=0.05)]
        data = [[tensor.double() for tensor in make_data(4, seed=seed)] for seed in range(12)]
        for at in range(0, 12, 2 * steps):
            losses = [mse(model(inputs), targets) for inputs, targets in data[at : at + 2 * steps]]
            torch.stack(losses).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    orders = ["abAB", "aAbB", "bBaA", "aAAbB"]
    expected = [by_hand()] * len(orders)
    for results in ranks.run(2, lambda: [train(order) for order in orders]):
        torch.testing.assert_close(results, expected)


def set_gradients(way, averages):
    """Train by gradients of `torch.autograd.grad`; `way` names what of model and optimizer is prepared, and how."""
    accelerator = Accelerator(cpu=True, check_ranks=None if way != "not compared" else False)
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    if way != "optimizer of torch":
        optimizer = accelerator.prepare(optimizer)
    forward = accelerator.unwrap_model(model) if way == "past the wrapper" else model
    for _ in range(3):
        inputs, targets = make_data(4, seed=accelerator.process_index)
        with accelerator.no_sync(model) if way != "plainly" else contextlib.nullcontext():
            loss = mse(forward(inputs), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = accelerator.reduce(gradient, "mean") if averages else gradient
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


WAYS_TO_SET = ["plainly", "no_sync", "past the wrapper", "optimizer of torch", "not compared"]


@pytest.mark.parametrize("way", WAYS_TO_SET)
def test_gradients_that_are_averaged_by_hand_are_used(ranks, way):
    model = make_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [make_data(4, seed=seed) for seed in range(2)]
    for _ in range(3):
        torch.stack([mse(model(inputs), targets) for inputs, targets in data]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in ranks.run(2, set_gradients, way, True):
        torch.testing.assert_close(result, weights(model))


@pytest.mark.parametrize("way", WAYS_TO_SET[:-1])
def test_gradients_of_one_rank_that_are_set_by_hand_are_refused(ranks, way):
    error = ranks.error(2, set_gradients, way, False)
    assert re.search(r"gradients of Sequential differ between the ranks.*accelerator.reduce\(", error), error


def no_sync_around_the_forward(**options):
    accelerator, model, optimizer, loss = prepare(**options)
    with accelerator.no_sync(model):
        value = loss()
    accelerator.backward(value)
    optimizer.step()


def no_sync_around_a_compiled_forward():
    no_sync_around_the_forward(dynamo_backend="eager")


def two_backwards_through_one_forward():
    accelerator, model, optimizer, _ = prepare()
    outputs = model(torch.rand(4, 3))
    accelerator.backward(outputs.mean(), retain_graph=True)
    accelerator.backward(outputs.square().mean())
    try:
        optimizer.step()
    finally:  # The next update is whole.
        optimizer.zero_grad()
        accelerator.backward(model(torch.rand(4, 3)).mean())
        optimizer.step()


def past_the_wrapper():
    accelerator, model, optimizer, _ = prepare()
    inputs, targets = make_data(4)
    accelerator.backward(mse(accelerator.unwrap_model(model)(inputs), targets))
    optimizer.step()


def frozen_late():
    accelerator, model, optimizer, loss = prepare()
    accelerator.unwrap_model(model)[0].requires_grad_(False)
    accelerator.backward(loss())
    optimizer.step()


def leaf_by_hand():
    accelerator = Accelerator(cpu=True)
    leaf = torch.ones(1, requires_grad=True)
    leaf, optimizer = accelerator.prepare(leaf, torch.optim.SGD([leaf], lr=0.1))
    (leaf * 2).sum().backward()
    optimizer.step()


class Encoder(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.dim, self.scale, self._codes = 7, 2.0, [1]
        torch.nn.init.ones_(self.weight)

    def encode(self, inputs):
        return inputs @ self.weight.T * self.scale


def by_a_method():
    accelerator, model, optimizer, _ = prepare(model=Encoder())
    accelerator.backward(model.encode(make_data(4)[0]).sum())
    optimizer.step()


def test_attributes_and_methods_of_a_prepared_model_are_reached_on_any_number_of_ranks(ranks):
    def use():
        model = Accelerator(cpu=True).prepare(Encoder())
        model.scale, model.note = 3.0, "a new one"
        with pytest.raises(AttributeError) as absent:
            _ = model.decode
        private = pytest.raises(AttributeError) if hasattr(model, "module") else contextlib.nullcontext()
        with private as hidden:
            _ = model._codes
        messages = [str(absent.value), *([str(hidden.value)] if hidden else [])]
        return model.encode(torch.ones(1, 3)).item(), model.in_features, model.dim, model.note, messages

    *found, messages = use()
    assert found == [9.0, 3, 7, "a new one"]
    assert messages == ["'Encoder' object has no attribute 'decode'"]
    for *mine, words in ranks.run(2, use):
        assert mine == found
        assert words[0] == messages[0]
        assert words[1].startswith("'_codes' is private to Encoder, which prepare() wraps on several ranks. Write acc")


@pytest.mark.parametrize(("mistake", "message"), [
    (no_sync_around_the_forward, r"Sequential were not synchronised.*left out on this rank, or ran under no_sync\(\)"),
    (no_sync_around_a_compiled_forward, r"left out on this rank, or ran under no_sync\(\)"),
    (two_backwards_through_one_forward, r"A second backward\(\) went through a forward.*backward\(loss_a \+"),
    (past_the_wrapper, r"gradients of Sequential were not synchronised.*went past the prepared model"),
    (by_a_method, r"gradients of Encoder were not synchronised.*a method such as model\.encode\(x\)"),
    (frozen_late, r"gradients of Sequential were not synchronised.*did not reach 0.weight, 0.bias\. Pass Accelerator"),
    (leaf_by_hand, r"gradients of a leaf tensor were not synchronised.*Call accelerator.backward\(loss\)"),
])  # fmt: skip
def test_misuse_that_makes_ranks_diverge_is_refused(ranks, mistake, message):
    error = ranks.error(2, mistake)
    assert re.search(message, error), error


def usually():
    accelerator, model, optimizer, loss = prepare(steps=2)
    for _ in range(4):
        micro_batch(accelerator, model, optimizer, loss)
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return weights(model)


def without_accumulate():
    accelerator, model, optimizer, loss = prepare()
    for _ in range(3):  # As in Accelerate's guide, before it comes to the helper.
        accelerator.backward(loss() / 3)
    optimizer.step()
    return weights(model)


def test_backwards_without_accumulate_add_up_to_what_was_written(ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        total: Any = one_weight()
        model, loader = accelerator.prepare(total, numbers(8))
        for batch in loader:
            accelerator.backward(model(batch).mean() / len(loader))
        return total.weight.grad.item()

    assert ranks.run(2, train) == [4.5] * 2


def no_sync_around_backward_only():
    accelerator, model, optimizer, loss = prepare()
    value = loss()
    with pytest.warns(UserWarning, match=r"no_sync\(\) was around the backward only"), accelerator.no_sync(model):
        accelerator.backward(value)
    optimizer.step()
    return weights(model)


def loss_backward():
    _, model, optimizer, loss = prepare()
    loss().backward()
    optimizer.step()
    return weights(model)


def triggered_later():
    accelerator, model, optimizer, loss = prepare()
    with accelerator.no_sync(model):
        first, second = loss(), loss()
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    "way", [usually, without_accumulate, no_sync_around_backward_only, loss_backward, triggered_later]
)
def test_weights_of_ranks_start_and_stay_equal(ranks, way):
    assert_same(ranks.run(3, way))


def test_trigger_set_on_one_rank_is_seen_on_all(ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        seen = [accelerator.check_trigger()]
        if accelerator.is_last_process:
            accelerator.set_trigger()
        return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]

    assert ranks.run(3, train) == [[False, True, False]] * 3


def test_join_uneven_inputs_lets_ranks_with_more_batches_continue_without_windows(ranks):
    def train():
        accelerator, model, optimizer, _ = prepare()
        loader = accelerator.prepare(DataLoader(TensorDataset(*make_data(6)), 2))
        num = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for inputs, targets in loader:
                num += 1
                accelerator.backward(mse(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        return num

    def join() -> None:
        accelerator, model, _, _ = prepare(steps=2)
        with accelerator.join_uneven_inputs([model]):
            pass  # All ranks have as many batches.
        accelerator.join_uneven_inputs([model], even_batches=False).__enter__()

    assert ranks.run(2, train) == [2, 1]
    assert "with gradient_accumulation_steps=2: torch's Join follows" in ranks.error(2, join)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd", "batched_power_sgd"])
def test_communication_hooks_train(ranks, hook):
    def train():
        options = {"matrix_approximation_rank": 1} if "power" in hook else {}
        handler = DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options)
        # Over 1 MiB, so that DDP makes several buckets of it where it may; a mean of so many linear models.
        model = torch.nn.Sequential(torch.nn.Linear(3, 200_000), torch.nn.AdaptiveAvgPool1d(1))
        accelerator, model, optimizer, loss = prepare(kwargs_handlers=[handler], model=model)
        optimizer.param_groups[0]["lr"] = 1e4
        losses = []
        for _ in range(5):
            value = micro_batch(accelerator, model, optimizer, loss)
            losses.append(accelerator.reduce(value, "mean").item())
        return losses, [tensor.flatten()[:5].clone() for tensor in weights(model)]

    results = ranks.run(2, train)
    assert results[0][0][-1] < results[0][0][0]
    assert_same([result[1] for result in results])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_alike_on_several_ranks(ranks, precision):
    def train():
        accelerator, model, optimizer, loss = prepare(steps=2, mixed_precision=precision)
        losses = []
        for _ in range(12):
            value = micro_batch(accelerator, model, optimizer, loss, weight=100 * (accelerator.process_index + 1))
            losses.append(accelerator.reduce(value, "mean").item())
        skipped = accelerator.optimizer_step_was_skipped
        return losses, skipped, weights(accelerator.unwrap_model(model))

    results = ranks.run(2, train)
    assert results[0][0][-1] < results[0][0][0]
    assert not results[0][1]
    assert_same([result[2] for result in results])


def test_overflow_on_one_rank_is_skipped_by_all(ranks):
    def train():
        accelerator, model, optimizer, loss = prepare(steps=2, mixed_precision="fp16")
        before = weights(model)
        for _ in range(2):
            micro_batch(
                accelerator, model, optimizer, lambda: loss() * (torch.inf if accelerator.is_last_process else 1)
            )
        unchanged = all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))
        scaler: Any = accelerator.scaler
        return accelerator.optimizer_step_was_skipped, unchanged, scaler.get_scale()

    assert ranks.run(2, train) == [(True, True, 32768.0)] * 2


def test_two_optimizers_share_one_scaler(ranks):
    def train():
        scaler = GradScalerKwargs(init_scale=1024.0)
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", max_grad_norm=0.5, kwargs_handlers=[scaler])
        generator, critic = accelerator.prepare(make_model(), make_model(seed=1))
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
        first, second = accelerator.prepare(first, second)
        inputs, targets = make_data(4, seed=accelerator.process_index)
        for _ in range(3):
            with accelerator.accumulate(generator, critic):
                accelerator.backward(mse(generator(inputs), targets) + mse(critic(inputs), targets))
                accelerator.clip_grad_norm_(generator.parameters(), 1.0)
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
        used: Any = accelerator.scaler
        return used.get_scale(), weights(generator), weights(critic)

    results = ranks.run(2, train)
    assert results[0][0] == 1024.0
    assert_same([result[1] for result in results])
    assert_same([result[2] for result in results])


@pytest.mark.parametrize("sizes_by_rank", [[[1, 5], [3, 2]], [[1, 5, 2], [3]]])
def test_check_accumulation_is_exact_on_several_ranks(ranks, sizes_by_rank):
    def check():
        accelerator, model, _, _ = prepare(steps=4)
        batches = [make_data(size, seed=size) for size in sizes_by_rank[accelerator.process_index]]
        report = accelerator.check_accumulation(model, batches, lambda model, batch: mse(model(batch[0]), batch[1]))
        return report.ok, report.total_weight

    assert ranks.run(2, check) == [(True, 11.0)] * 2
