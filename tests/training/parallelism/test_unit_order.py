"""Ranks of a sharded model that run different units, or in another order, are named before they get wrong weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_launcher import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    notebook_launch,
)
from tests.support.toy_training import session_fixture, shards_on_cpus

pytestmark = shards_on_cpus

session = session_fixture(2)


class Layers(torch.nn.Module):
    """Layers of one shape, of which each forward runs some."""

    def __init__(self, num: int = 3, width: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(num))

    def forward(self, inputs: torch.Tensor, run: list[int]) -> torch.Tensor:
        for place in run:
            inputs = self.layers[place](inputs)
        return inputs.square().mean()


def shard(*nets: torch.nn.Module, reshard: bool = True, **options: Any) -> Any:
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            reshard_after_forward=reshard,
        ),
        **options,
    )
    return accelerator, *(accelerator.prepare(net) for net in nets)


def train(run: tuple[list[list[int]], list[list[int]]], *, num_layers: int = 3, **options: Any) -> list[float]:
    """Train layers in the order of `run`, by rank, and return the first parameter."""
    torch.manual_seed(0)
    accelerator, net = shard(Layers(num_layers), **options)
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    for places in run[accelerator.process_index]:
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(2, 4), places))
            optimizer.step()
            optimizer.zero_grad()
    weight: Any = next(net.parameters())
    return [float(each) for each in weight.full_tensor().flatten()]


DIFFERENT = {
    "another layer": ([[0]], [[1]]),
    "later": ([[0, 1], [0, 1], [0, 2]], [[0, 1], [0, 1], [0, 1]]),
    "one layer less": ([[0, 1]], [[0, 1, 2]]),
}


@pytest.mark.parametrize(("case", "reshard"), list(zip(DIFFERENT, [True, False, True], strict=True)))
def test_ranks_that_run_other_layers_are_named(case, reshard):
    pattern = (
        r"Rank (0|1) (gathers|reduces the gradients of) layers\.\d\.weight, layers\.\d\.bias while rank (1|0) "
        r"(gathers|reduces the gradients of) layers\.\d\.weight, .*run the same layers in the same order"
    )
    with pytest.raises(RuntimeError, match=pattern):
        notebook_launch(train, 2, args=(DIFFERENT[case],), kwargs={"reshard": reshard}, devices="cpu", output="none")


def evaluate(places: tuple[int, int]) -> float:
    accelerator, net = shard(Layers())
    with torch.no_grad():
        return float(net(torch.ones(2, 4), [places[accelerator.process_index]]))


def test_ranks_that_evaluate_other_layers_are_named():
    with pytest.raises(RuntimeError, match=r"Rank \d gathers layers\.\d\.weight, .* while rank \d gathers layers\."):
        notebook_launch(evaluate, 2, args=((0, 1),), devices="cpu", output="none")


@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_that_run_the_same_layers_train(session, reshard):
    run = [[0, 1, 2], [2, 1], [0], [1, 1, 0], *([[0, 2]] * 60)]
    first, second = session.run(train, args=((run, run),), kwargs={"reshard": reshard})
    assert first == second


def test_ranks_that_compare_nothing_are_not_refused(session):
    session.run(train, args=(DIFFERENT["another layer"],), kwargs={"check_ranks": False})


# --------------------------------------------------------------------------------------------------------------------
# Gradients of different parameters of one unit.


class Two(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = torch.nn.Linear(2, 2, bias=False)
        self.b = torch.nn.Linear(2, width, bias=False)

    def forward(self, inputs: torch.Tensor, used: str) -> torch.Tensor:
        outputs: list[torch.Tensor] = [getattr(self, name)(inputs).sum() for name in used]
        return torch.stack(outputs).sum()


def use(used: tuple[list[str], list[str]], width: int = 2, num_steps: int = 1, **options: Any) -> list[list[float]]:
    """Train one unit of two layers, of which each rank uses these in each micro-batch."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps, sync_each_batch=False),
        fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"),
        **options,
    )
    torch.manual_seed(0)
    net: Any = Two(width)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for names in used[accelerator.process_index]:
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(1, 2), names))
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.full_tensor().flatten().tolist() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("used", "width", "num_steps"),
    [
        ((["ab", "ab", "a"], ["ab", "ab", "b"]), 5, 1),
        ((["a", "b"], ["b", "a"]), 2, 1),
        ((["ab", "ab", "a", "a"], ["ab", "ab", "b", "b"]), 2, 2),
    ],
    ids=["later", "in turns", "in one window"],
)
def test_gradients_of_different_parameters_are_refused(used, width, num_steps):
    pattern = r"Rank \d reduces the gradients of (a|b)\.weight.* while rank \d reduces .*find_unused_parameters=True"
    with pytest.raises(RuntimeError, match=pattern):
        notebook_launch(use, 2, args=(used, width, num_steps), devices="cpu", output="none")


def test_ranks_that_use_the_same_parameters_train(session):
    for used in (["a", "b"] * 3, ["a"] * 6, ["a", "a", "ab", "ab", "b", "ab"]):
        first, second = session.run(use, args=((used, used), 5))
        assert first == second
    first, second = session.run(use, args=((["a", "b"] * 2, ["b", "a"] * 2), 5, 2))
    assert first == second, "equal in the window as a whole"
    first, second = session.run(use, args=((["a"], ["b"]),), kwargs={"check_ranks": False})
    assert first == second, "nothing is compared"
