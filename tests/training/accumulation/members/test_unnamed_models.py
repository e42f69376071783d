"""Models that a block trains though `accumulate` was given another one: they belong to its window, too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator
from tests.support.toy_training import Sessions, sessions_fixture

ranks = sessions_fixture(1, 2)
STEPS = 2


def one_weight() -> torch.nn.Linear:
    linear = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(linear.weight)
    return linear


def train(
    trained: str, order: str, num_samples: int, *, weighs: bool, shares: bool = False
) -> list[tuple[float, float, float]]:
    """Return the gradients of the unnamed and of the named model at each update, and their total norm."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    head, encoder, prompt = one_weight(), one_weight(), torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    unnamed = [prompt] if trained == "a tensor" else list(encoder.parameters())
    data: Any = torch.arange(1.0, num_samples + 1, dtype=torch.float64)[:, None]
    parts = [[*unnamed, *head.parameters()]] if shares else [unnamed, list(head.parameters())]
    head, encoder, prompt, loader, *optimizers = accelerator.prepare(
        head, encoder, prompt, DataLoader(data, batch_size=2), *(torch.optim.SGD(part, lr=0.0) for part in parts)
    )
    both, found = [*unnamed, *head.parameters()], []
    for numbers in loader:
        with accelerator.accumulate(head):
            if order == "clear, backward, step":
                for optimizer in optimizers:
                    optimizer.zero_grad()
            loss = head(numbers * prompt if trained == "a tensor" else encoder(numbers)).mean()
            accelerator.backward(loss, weight=len(numbers) if weighs else None)
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
