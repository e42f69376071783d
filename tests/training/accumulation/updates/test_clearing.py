"""The prepared optimizer's `zero_grad` clears as torch's does, and asks the optimizer where that could differ."""

from __future__ import annotations

import pytest
import torch

from notebook_launcher import Accelerator

LABEL = "Optimizer.zero_grad#SGD.zero_grad"


def prepare(optimizer_class=torch.optim.SGD, **options):
    model = torch.nn.Linear(2, 1)
    optimizer = Accelerator(cpu=True).prepare(optimizer_class(model.parameters(), lr=0.1, **options))
    model(torch.ones(1, 2)).sum().backward()
    return model, optimizer


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
def test_gradients_become_none(options):
    model, optimizer = prepare(**options)
    optimizer.zero_grad()
    assert gradients(model) == [None, None]
    optimizer.zero_grad()
    assert gradients(model) == [None, None]


def test_gradients_become_zeros_where_asked():
    model, optimizer = prepare()
    before = gradients(model)
    optimizer.zero_grad(set_to_none=False)
    after = gradients(model)
    assert [new is old for new, old in zip(after, before, strict=True)] == [True, True]
    assert all(not gradient.any() for gradient in after)


def test_all_groups_are_cleared():
    model, optimizer = prepare()
    other = torch.zeros(1, requires_grad=True)
    optimizer.add_param_group({"params": [other]})
    other.sum().backward()
    optimizer.zero_grad()
    assert [*gradients(model), other.grad] == [None, None, None]


class Counting(torch.optim.SGD):
    cleared = 0

    def zero_grad(self, set_to_none=True):
        self.cleared += 1
        super().zero_grad(set_to_none)


def test_zero_grad_of_a_class_of_its_own_is_called():
    model, optimizer = prepare(Counting)
    optimizer.zero_grad()
    assert optimizer.optimizer.cleared == 1
    assert gradients(model) == [None, None]


def test_zero_grad_of_one_optimizer_is_called():
    model, optimizer = prepare()
    calls = []
    optimizer.optimizer.zero_grad = lambda **options: calls.append(options)
    optimizer.zero_grad()
    assert calls == [{"set_to_none": True}]
    assert None not in gradients(model)


def test_zero_grad_that_a_program_has_replaced_is_called(monkeypatch):
    model, optimizer = prepare()
    calls = []
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda _, **options: calls.append(options))
    optimizer.zero_grad()
    assert calls == [{"set_to_none": True}]
    assert None not in gradients(model)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of torch 2.11
@pytest.mark.parametrize("profile", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_profiler_records_the_label_of_torch(profile):
    model, optimizer = prepare()
    with profile() as recorded:
        optimizer.zero_grad()
    assert LABEL in [event.key for event in recorded.key_averages()]
    assert gradients(model) == [None, None]


def test_compiled_loop_clears():
    model, optimizer = prepare()

    @torch.compile(backend="eager")
    def clear():
        optimizer.zero_grad()
        return torch.ones(2).sum()

    assert clear() == 2
    assert gradients(model) == [None, None]
