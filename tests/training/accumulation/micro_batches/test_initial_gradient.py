"""The backward with a known initial gradient: the same as torch's own, bit for bit, and its refusals."""

from __future__ import annotations

import pytest
import torch

from notebook_launcher import Accelerator
from notebook_launcher.training.accumulation import micro_batches
from notebook_launcher.training.accumulation.micro_batches import InitialGradient


def loss_of(weight: torch.Tensor, shape: tuple[int, ...] = ()) -> torch.Tensor:
    return (weight.sin() * weight).mean().reshape(shape)


def gradient_by_hand(factor: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weight = torch.linspace(-1, 1, 7, dtype=dtype, requires_grad=True)
    loss = loss_of(weight)
    loss.backward(gradient=torch.tensor(factor, dtype=dtype))
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradient_is_that_of_torch(shape, dtype):
    initial = InitialGradient()
    for factor in (1.0, 0.25, 1 / 3, 0.25):
        weight = torch.linspace(-1, 1, 7, dtype=dtype, requires_grad=True)
        loss = loss_of(weight, shape)
        micro_batches.backward(loss, initial.of(loss, factor), {})
        assert weight.grad is not None
        assert torch.equal(weight.grad, gradient_by_hand(factor, dtype))


def test_torch_without_the_engines_name_runs_its_own_backward(monkeypatch):
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    weight = torch.linspace(-1, 1, 7, requires_grad=True)
    loss = loss_of(weight).mul(torch.ones(()))
    called = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss, gradient: called.append((loss, float(gradient))))
    micro_batches.backward(loss, torch.tensor(0.5), {})
    assert called == [(loss, 0.5)]


def test_complex_loss_is_refused():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1, dtype=torch.complex64))
    with (
        accelerator.accumulate(model),
        pytest.raises(
            RuntimeError, match=r"a loss of torch.complex64: .* only for real scalar outputs. Take a real number"
        ),
    ):
        accelerator.backward(model(torch.ones(1, 2, dtype=torch.complex64)).sum())
