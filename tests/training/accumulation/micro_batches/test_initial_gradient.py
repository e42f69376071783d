"""The backward with a known initial gradient: the same as torch's own, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode

from notebook_launcher.training.accumulation import micro_batches
from notebook_launcher.training.accumulation.micro_batches import InitialGradient


class Noting(TorchFunctionMode):
    """Notes which functions of torch were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def loss_of(weight: torch.Tensor) -> torch.Tensor:
    return (weight.sin() * weight).mean()


DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize(("shape", "dtype"), list(itertools.product([(), (1,), (1, 1)], DTYPES)))
def test_gradient_is_that_of_torch(shape, dtype):
    initial = InitialGradient()
    for factor in (1.0, 0.25, 1 / 3, 0.25):
        mine, theirs = (torch.linspace(-1, 1, 7, dtype=dtype, requires_grad=True) for _ in range(2))
        loss = loss_of(mine).reshape(shape)
        micro_batches.backward(loss, initial.of(loss, factor), {})
        loss_of(theirs).backward(gradient=torch.tensor(factor, dtype=dtype))
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_arguments_of_torchs_backward_keep_their_meaning_and_modes_see_it():
    weight = torch.ones(3, requires_grad=True)
    loss = loss_of(weight)
    micro_batches.backward(loss, torch.tensor(1.0), {"retain_graph": True})
    with Noting() as mode:
        micro_batches.backward(loss, torch.tensor(1.0), {})
    assert "backward" in mode.names
    assert weight.grad is not None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        micro_batches.backward(loss, torch.tensor(1.0), {})


def test_torch_without_the_engines_name_runs_its_own_backward(monkeypatch):
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    called = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss, gradient: called.append((loss, float(gradient))))
    loss = loss_of(torch.ones(3, requires_grad=True))
    micro_batches.backward(loss, torch.tensor(0.5), {})
    assert called == [(loss, 0.5)]
