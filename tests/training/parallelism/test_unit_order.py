"""Ranks of a sharded model that run different units, or in another order, are named before they get wrong weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_launcher import Accelerator, FullyShardedDataParallelPlugin, GradientAccumulationPlugin, notebook_launch
from tests.support.toy_training import micro_batch, sessions_fixture, shards_on_cpus

pytestmark = shards_on_cpus

ranks = sessions_fixture(2)


class Layers(torch.nn.Module):
    """Layers of one shape, of which each forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: torch.Tensor, run: list[int]) -> torch.Tensor:
        for place in run:
            inputs = self.layers[place](inputs)
        return inputs.square().mean()


def train(run: list[Any], reshard: bool = True, evaluates: bool = False, **options: Any) -> list[float]:
    """Train or evaluate layers in the order of `run`, by rank, and return the first parameter."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            reshard_after_forward=reshard,
        ),
        **options,
    )
    net: Any = accelerator.prepare(Layers())
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    for places in run[accelerator.process_index]:
        if evaluates:
            with torch.no_grad():
                net(torch.ones(2, 4), places)
        else:
            with micro_batch(accelerator, optimizer, net) as backward:
                backward(net(torch.ones(2, 4), places))
    return [float(each) for each in next(net.parameters()).full_tensor().flatten()]


@pytest.mark.parametrize(
    ("run", "reshard", "evaluates"),
    [
        ([[[0]], [[1]]], True, False),
        ([[[0, 1], [0, 1], [0, 2]], [[0, 1], [0, 1], [0, 1]]], False, False),
        ([[[0, 1]], [[0, 1, 2]]], True, False),
        ([[[0]], [[1]]], True, True),
    ],
    ids=["another layer", "later", "one layer less", "in an evaluation"],
)
def test_ranks_that_run_other_layers_are_named(run, reshard, evaluates):
    pattern = (
        r"Rank (0|1) (gathers|reduces the gradients of) layers\.\d\.weight, layers\.\d\.bias while rank (1|0) "
        r"(gathers|reduces the gradients of) layers\.\d\.weight, .*run the same layers in the same order"
    )
    with pytest.raises(RuntimeError, match=pattern):
        notebook_launch(train, 2, args=(run, reshard, evaluates), devices="cpu", output="none")


@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_that_run_the_same_layers_train(ranks, reshard):
    run = [[0, 1, 2], [2, 1], [0], [1, 1, 0], *([[0, 2]] * 60)]
    first, second = ranks[2].run(train, args=([run, run], reshard))
    assert first == second


def test_ranks_that_compare_nothing_are_not_refused(ranks):
    ranks[2].run(train, args=([[[0]], [[1]]],), kwargs={"check_ranks": False})


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
        with micro_batch(accelerator, optimizer, net) as backward:
            backward(net(torch.ones(1, 2), names))
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


def test_ranks_that_use_the_same_parameters_train(ranks):
    for used in (["a", "b"] * 3, ["a"] * 6, ["a", "a", "ab", "ab", "b", "ab"]):
        first, second = ranks[2].run(use, args=((used, used), 5))
        assert first == second
    first, second = ranks[2].run(use, args=((["a", "b"] * 2, ["b", "a"] * 2), 5, 2))
    assert first == second, "equal in the window as a whole"
    first, second = ranks[2].run(use, args=((["a"], ["b"]),), kwargs={"check_ranks": False})
    assert first == second, "nothing is compared"
