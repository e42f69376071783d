"""Advice on errors of torch, with the texts that this torch and older ones write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import Accelerator, notebook_launch
from notebook_launcher.kernel.failures.failure_display import advice_on
from tests.support.toy_training import shards_on_cpus

if TYPE_CHECKING:
    from collections.abc import Callable


def make(kind: Any = torch.optim.SGD) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    return accelerator, *accelerator.prepare(model, kind(model.parameters(), lr=0.1))


def freeze_late() -> None:
    accelerator, model, _ = make()
    model.module[0].requires_grad_(False)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 3)).sum())


def repeat_a_part() -> None:
    from torch.utils.checkpoint import checkpoint

    accelerator, model, _ = make()
    part = model.module[0]
    model.module.forward = lambda x: checkpoint(part, checkpoint(part, x, use_reentrant=True), use_reentrant=True)
    accelerator.backward(model(torch.ones(2, 3, requires_grad=True)).sum())


def penalise() -> None:
    accelerator, model, _ = make()
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    accelerator.backward(model(torch.ones(2, 3)).square().mean() + 0.1 * penalty)


def reshape() -> None:
    accelerator, model, optimizer = make(torch.optim.LBFGS)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        accelerator.backward(loss)
        return loss

    optimizer.step(closure)


def factorise() -> None:
    accelerator, model, optimizer = make(torch.optim.Adafactor)
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()


class Encoder(torch.nn.Linear):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def call_method() -> None:
    model: Any = torch.nn.parallel.DistributedDataParallel(Encoder(2, 2))
    model.encode(torch.ones(1, 2))


def average() -> None:
    _, model, _ = make()
    torch.optim.swa_utils.AveragedModel(model)


def name_without_import() -> None:
    skip_first_batches([], 1)  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("train", "shard", "advice"),
    [
        (name_without_import, None, "Type `from notebook_launcher import skip_first_batches` (`import *` leaves out"),
        (call_method, None, "write accelerator.unwrap_model(model).encode. Gradients"),
        (freeze_late, None, "pass DistributedDataParallelKwargs(find_unused_parameters=True)"),
        (repeat_a_part, None, "pass DistributedDataParallelKwargs(static_graph=True)"),
        pytest.param(penalise, 2, "sum over parameter.full_tensor() on every rank", marks=shards_on_cpus),
        pytest.param(reshape, 2, "as LBFGS and Adafactor do", marks=shards_on_cpus),
        pytest.param(factorise, 2, "as LBFGS and Adafactor do", marks=shards_on_cpus),
        pytest.param(average, 2, "A sharded model cannot be copied", marks=shards_on_cpus),
    ],
)
def test_failure_adds_the_advice_that_torch_omits(train: Callable[[], None], shard: int | None, advice: str) -> None:
    with pytest.raises((RuntimeError, AssertionError, AttributeError, NameError)) as failure:
        notebook_launch(train, 2, shard=shard, output="none")
    shown: Any = vars(failure.value)["_render_traceback_"]
    assert advice in "\n".join(shown())


@pytest.mark.parametrize(
    "text",
    [
        "Attempted to flatten unevenly sharded dimension 0, which would require resharding the input.",
        "Sharding propagation failed for Op(op=aten.view.default, args_schema=Spec(S(0) on (3, 3)), [-1] @ mesh: (2,))",
    ],
    ids=["torch-2.11", "torch-2.9"],
)
def test_words_of_older_torch_get_the_advice_too(text: str) -> None:
    (advice,) = advice_on(text)
    assert "as LBFGS and Adafactor do" in advice
