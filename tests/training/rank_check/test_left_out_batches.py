"""Micro-batches that a loop leaves out: exact where all ranks do, or weights are given; an error where only some do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator
from tests.support.toy_training import numbers, one_weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.support.toy_training import Sessions

STEPS = 4
MISTAKE = "a block of accumulate\\(\\) ended without a backward"


def train(
    leave_out: Mapping[int, Iterable[int]],
    *,
    raises: bool = False,
    steps: bool = False,
    skips: bool = False,
    weight: float | None = None,
    **options: Any,
) -> Any:
    """Return the gradient of each update: the mean of the numbers in its window. Each rank leaves its rounds out."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **options)
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, numbers(accelerator.num_processes * 3 * STEPS))
    mine = leave_out.get(accelerator.process_index, ())
    gradients = []
    for number, batch in enumerate(loader):
        if skips and number in mine:
            continue
        try:
            with accelerator.accumulate(model):
                loss = model(batch).mean()
                if number in mine and raises:
                    Path("/nowhere").stat()
                if number in mine and not steps:
                    continue
                if number not in mine:
                    accelerator.backward(loss, weight=weight)
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                if accelerator.sync_gradients:
                    gradients.append(next(model.parameters()).grad.item())
                optimizer.zero_grad()
        except OSError:
            continue
    return gradients


def means(num_ranks: int, left_out: Iterable[tuple[int, int]] = ()) -> list[float]:
    """Return the means of the windows without what (rank, round) leaves out; a last round left out is made up for."""
    found, held, size = [], [], 0
    for at in range(3 * STEPS):
        numbers = [num_ranks * at + rank + 1 for rank in range(num_ranks) if (rank, at) not in set(left_out)]
        held += numbers
        size += 1
        if size == STEPS and not numbers and held:
            size -= 1
        elif size == STEPS or at == 3 * STEPS - 1:
            found.append(sum(held) / len(held))
            held, size = [], 0
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("steps", [False, True])
def test_micro_batch_that_all_ranks_leave_out_does_not_count(ranks: Sessions, num_ranks: int, *, steps: bool) -> None:
    cases: list[tuple[int, ...]] = [(), (5,), (1, 2, 8), (3,), (3, 4), (6, 7)]

    def train_all() -> list[list[float]]:
        return [train(dict.fromkeys(range(num_ranks), case), steps=steps) for case in cases]

    for found in ranks.run(num_ranks, train_all):
        for left_out, gradients in zip(cases, found, strict=True):
            expected = means(num_ranks, [(rank, at) for rank in range(num_ranks) for at in left_out])
            assert gradients == pytest.approx(expected, abs=1e-12), left_out


def test_micro_batch_that_one_rank_leaves_out_does_not_count_where_weights_are_given(ranks: Sessions) -> None:
    for gradients in ranks.run(2, lambda: train({1: (5, 8)}, weight=1.0)):
        assert gradients == pytest.approx(means(2, [(1, 5), (1, 8)]), abs=1e-12)


AT_ITS_UPDATE = rf"update 2: rank 1 left a .* did not: {MISTAKE}.*pass weight=len\(inputs\)"
NO_BLOCK = r"rank 1 left a .* did not: no block of accumulate\(\) began for a batch"
AT_ITS_NEXT_BACKWARD = rf"update 1: rank 1 left a .*{MISTAKE}.*run its backward with weight=0"


@pytest.mark.parametrize(("num_ranks", "left_out", "options", "words"), [
    *((number, {1: (5,)}, {"raises": raises}, AT_ITS_UPDATE) for number in (2, 3) for raises in (False, True)),
    *((2, {1: (at,)}, {"skips": True}, f"update {at // STEPS + 1}: {NO_BLOCK}") for at in (0, 1, 3, 4, 8)),
    *((2, {1: (3,)}, {"steps": steps}, AT_ITS_NEXT_BACKWARD) for steps in (False, True)),
    (2, {0: (0,), 1: (2, 1)}, {}, f"update 1: rank . left a .*{MISTAKE}"),  # An error on each rank.
])  # fmt: skip
def test_batch_that_one_rank_leaves_out_is_an_error_on_that_rank(
    ranks: Sessions, num_ranks: int, left_out: Any, options: Any, words: str
) -> None:
    with pytest.raises(RuntimeError, match=words) as caught:
        ranks.run(num_ranks, lambda: train(left_out, **options))
    assert caught.value.rank in left_out  # type: ignore[attr-defined]


def test_batches_without_a_block_on_all_ranks_or_with_weights_are_exact(ranks: Sessions) -> None:
    skipped = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}  # As a loop does that continues an epoch.
    with pytest.raises(RuntimeError, match="update 3: rank 1 left a"):
        ranks.run(2, lambda: train({1: (8,)}))  # Rank 1 alone has a word to write, and the next run is another matter.
    for gradients in ranks.run(2, lambda: train(skipped, skips=True)):
        assert gradients == pytest.approx(means(2)[1:], abs=1e-12)
    weighed = ranks.run(2, lambda: train({1: (9,)}, skips=True, weight=1.0))
    assert weighed[0] == pytest.approx([*means(2)[:2], (17 + 18 + 19 + 21 + 22 + 23 + 24) / 7], abs=1e-12)


def test_batch_that_one_rank_draws_from_another_loader_is_not_left_out(ranks: Sessions) -> None:
    def train_beside_another() -> list[float]:
        accelerator = Accelerator(cpu=True)
        model = one_weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, loader, other = accelerator.prepare(model, optimizer, numbers(12), numbers(12))
        others, gradients = iter(other), []
        next(others)
        for number, batch in enumerate(loader):
            if number in (2, 4) and accelerator.process_index == 1:
                next(others)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                gradients.append(next(model.parameters()).grad.item())
                optimizer.zero_grad()
        return gradients

    for gradients in ranks.run(2, train_beside_another):
        assert gradients == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5]


def test_check_that_is_off_lets_a_rank_leave_micro_batches_out(ranks: Sessions) -> None:
    first, second = ranks.run(2, lambda: train({1: (5,)}, check_ranks=False))
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("steps", [False, True])
def test_last_micro_batch_of_a_loader_that_is_left_out_costs_its_window_with_a_warning(*, steps: bool) -> None:
    with pytest.warns(UserWarning, match="the last micro-batch of a loader had no backward, so the window has no end"):
        assert train({0: (11,)}, steps=steps) == pytest.approx(means(1)[:2])


def test_schedule_waits_for_the_update_that_was_put_off() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data: Any = torch.ones(4, 1)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(data, 1))
    rates = []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            if number != 1:
                accelerator.backward(model(batch).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    assert rates == [1.0, 1.0, 0.5, 0.25]
