"""The backward with a known initial gradient: the same as torch's own, bit for bit, and its refusals."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from notebook_launcher import Accelerator
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


def test_arguments_of_torchs_backward_keep_their_meaning():
    weight = torch.ones(3, requires_grad=True)
    loss = loss_of(weight)
    micro_batches.backward(loss, torch.tensor(1.0), {"retain_graph": True})
    micro_batches.backward(loss, torch.tensor(1.0), {})
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        micro_batches.backward(loss, torch.tensor(1.0), {})


def test_modes_see_the_backward():
    weight = torch.ones(3, requires_grad=True)
    loss = loss_of(weight)
    with Noting() as mode:
        micro_batches.backward(loss, torch.tensor(1.0), {})
    assert "backward" in mode.names
    assert weight.grad is not None


def test_torch_without_the_engines_name_runs_its_own_backward(monkeypatch):
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    weight = torch.linspace(-1, 1, 7, requires_grad=True)
    loss = loss_of(weight).mul(torch.ones(()))
    called = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss, gradient: called.append((loss, float(gradient))))
    micro_batches.backward(loss, torch.tensor(0.5), {})
    assert called == [(loss, 0.5)]


@pytest.mark.parametrize("steps", [1, 2])
def test_complex_loss_is_refused_in_every_window(steps):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = accelerator.prepare(torch.nn.Linear(2, 1, dtype=torch.complex64))
    with (
        accelerator.accumulate(model),
        pytest.raises(
            RuntimeError, match=r"a loss of torch.complex64: .* only for real scalar outputs. Take a real number"
        ),
    ):
        accelerator.backward(model(torch.ones(1, 2, dtype=torch.complex64)).sum())


def test_loss_without_a_graph_is_refused():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        accelerator.backward(torch.ones(()))
