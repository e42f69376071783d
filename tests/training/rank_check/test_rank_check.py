"""Ranks compare their weights now and then, in real launches: what is found, when, and what is left alone."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher import Accelerator, DistributedDataParallelKwargs, LocalSGD
from tests.support.toy_rank_check import ON_0, WEIGHTS, Training
from tests.support.toy_training import Sessions, fit, make_data, make_model

if TYPE_CHECKING:
    from pathlib import Path


def initialise_again() -> None:
    training = Training()
    torch.nn.init.normal_(training.last, mean=training.rank)
    training.step()


def change_a_gradient() -> None:
    training = Training()
    training.steps(4)
    training.step(lambda: training.last.grad.add_(training.rank == 1))
    training.steps(11)


def change_a_learning_rate() -> None:
    training = Training()
    training.optimizer.param_groups[0]["lr"] = 0.1 if training.rank < 2 else 0.3
    training.steps(2)


def change_an_optimizers_state() -> None:
    training = Training()
    training.step()
    training.optimizer.state[training.last]["exp_avg"] *= training.rank
    training.step()


def step_on_the_main_rank_alone() -> None:
    training = Training()
    for _ in range(2):
        inputs, targets = make_data(2)
        training.accelerator.backward(torch.nn.functional.mse_loss(training.model(inputs), targets))
        if training.accelerator.is_main_process:
            training.optimizer.step()


def change_a_leaf_tensor() -> None:
    accelerator = Accelerator(cpu=True)
    tensor = torch.ones(3, requires_grad=True)
    tensor, optimizer = accelerator.prepare(tensor, torch.optim.SGD([tensor], lr=0.1))
    for _ in range(2):
        accelerator.backward((tensor * accelerator.process_index).sum())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            tensor += accelerator.process_index == 2


OTHER = "Some ranks have changed weights or gradients by themselves"
DIVERGING = {
    initialise_again: f"update 1: {WEIGHTS}s 1 and 2 differ from those on rank 0, first in 2.bias, .* prepare",
    change_a_gradient: f"update 8: {WEIGHTS} 1 {ON_0}, first in 2.bias, .* 1 of 4 tensors. {OTHER}",
    change_a_learning_rate: "update 1: The learning rates differ: 0.1 on rank 0; 0.1 on rank 1; 0.3 on rank 2. S",
    change_an_optimizers_state: "update 2: the optimizer's states of .*, first in exp_avg of 2.bias, .* Load or change",
    step_on_the_main_rank_alone: f"update 2: {WEIGHTS} 0 differ from those on rank 1, first in 0",
    change_a_leaf_tensor: "update 2: the weights of the leaf tensors on rank 2 differ .* first in leaf tensor 0",
}


@pytest.mark.parametrize("diverge", DIVERGING, ids=lambda function: function.__name__)
def test_ranks_that_diverge_raise_an_error_with_the_parameter_and_the_ranks(ranks: Sessions, diverge: Any) -> None:
    error = ranks.error(3, diverge)
    assert re.match(f"RuntimeError: {DIVERGING[diverge]}", error), error
    assert "check_ranks=False" in error


def test_save_state_compares_and_writes_nothing_where_ranks_differ(ranks: Sessions, tmp_path: Path) -> None:
    def train() -> None:
        training = Training()
        training.steps(4)
        training.step(lambda: training.last.grad.add_(training.rank == 1))
        training.accelerator.save_state(tmp_path / "here")

    error = ranks.error(3, train)
    assert error.startswith("RuntimeError: save_state: the weights of Sequential on rank 1 differ from those on rank")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"check_ranks": False}, {"library": "notebook_launcher.compat"}])
def test_check_that_is_off_finds_nothing(ranks: Sessions, options: dict[str, Any]) -> None:
    def train() -> bool:
        training = Training(**options)
        training.step(lambda: training.last.grad.add_(training.rank == 1))
        training.steps(2)
        return training.accelerator.rank_check is None

    assert ranks.run(2, train) == [True, True]


def train_with_a_forgotten_optimizer(steps: int) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    for number in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 1.0 + number + accelerator.process_index)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.item() for parameter in model.parameters()]


def test_optimizer_that_was_not_prepared_raises_at_its_first_local_step(ranks: Sessions) -> None:
    error = ranks.error(2, train_with_a_forgotten_optimizer, 2)
    assert "this SGD was not prepared, and would update the Linear on each rank with" in error
    first, second = ranks.run(2, train_with_a_forgotten_optimizer, 1)  # every micro-batch is an update of all ranks
    assert first == second


# What may differ.


def train_local_sgd(folder: Path) -> Any:
    training = Training()
    training.step()
    with LocalSGD(training.accelerator, training.model, 4) as local_sgd:
        for _ in range(3):
            training.step()
            local_sgd.step()
        training.accelerator.save_state(folder)
    training.accelerator.save_state(folder)
    return training.number


def train_after_a_join(folder: Path) -> Any:
    training = Training()
    training.steps(2)
    with training.accelerator.join_uneven_inputs([training.model], even_batches=False):
        training.steps(5 + training.rank)
    training.accelerator.save_state(folder)
    return training.steps(2) - training.rank


def train_buffers_and_ignored_parameters(_: Path) -> int:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model[1].register_parameter("own", torch.nn.Parameter(torch.full((1,), 1.0 + torch.distributed.get_rank())))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.own"])
    handler = DistributedDataParallelKwargs(broadcast_buffers=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pytest's filters do not reach the ranks.
        training = Training(model, kwargs_handlers=[handler])
    buffer: Any = model[1].running_mean
    buffer.fill_(100 * training.rank)
    training.steps(5)
    assert (buffer.mean() > 20) == (training.rank == 1), "the buffers were shared"
    return training.number


def train_a_sharded_optimizer(_: Path) -> int:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    accelerator, model = Accelerator(cpu=True), make_model()
    model = accelerator.prepare(model)
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    seeds = range(100 * accelerator.process_index, 100 * accelerator.process_index + 5)
    fit(accelerator, model, accelerator.prepare(zero), (make_data(2, seed=seed) for seed in seeds))
    return 5


def train_two_networks_in_fp16(_: Path) -> int:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    first, second = accelerator.prepare(make_model(), make_model(seed=1))
    optimizers = accelerator.prepare(*(torch.optim.Adam(model.parameters()) for model in (first, second)))
    for number in range(12):
        inputs, targets = make_data(2, seed=number + 100 * accelerator.process_index)
        for at, (model, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
            if at and number % 4 < 2:  # one of them is trained half as often
                continue
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                # An overflow now and then, so that steps are skipped.
                accelerator.backward(loss * float("inf") if number == 4 else loss)
                optimizer.step()
                optimizer.zero_grad()
    return 5


HARMLESS = {
    train_local_sgd: 4,
    train_after_a_join: 9,
    train_buffers_and_ignored_parameters: 5,
    train_a_sharded_optimizer: 5,
    train_two_networks_in_fp16: 5,
}


@pytest.mark.parametrize("train", HARMLESS, ids=lambda function: function.__name__)
def test_differences_that_ranks_may_have_raise_nothing(ranks: Sessions, train: Any, tmp_path: Path) -> None:
    assert ranks.run(2, train, tmp_path / "checkpoint") == [HARMLESS[train]] * 2


def test_model_that_ranks_keep_is_compared_in_later_runs_too(ranks: Sessions) -> None:
    def begin() -> None:
        import __main__

        __main__.kept = Training()
        __main__.kept.steps(3)

    def go_on() -> None:
        from __main__ import kept

        kept.step()
        kept.step(lambda: kept.last.grad.add_(kept.rank == 1))
        kept.steps(3)

    ranks.run(2, begin)
    with pytest.raises(RuntimeError, match="update 8: the weights of Sequential on rank 1 differ"):
        ranks.run(2, go_on)
