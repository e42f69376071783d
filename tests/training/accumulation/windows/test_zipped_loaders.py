"""Loops over several prepared loaders: `zip`, an iterator drawn from inside a loop, and a loop inside a loop."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator
from tests.support.toy_training import Sessions, sessions_fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ranks = sessions_fixture(1, 2)


def numbers(count: int, batch_size: int = 2) -> Any:
    data: Any = torch.arange(1.0, count + 1)[:, None]
    return DataLoader(data, batch_size)


def zipped(first: Any, second: Any) -> Iterator[Any]:
    for batch, _ in zip(first, second, strict=False):
        yield batch


def zipped_last(first: Any, second: Any) -> Iterator[Any]:
    for _, batch in zip(second, first, strict=False):
        yield batch


def endless(first: Any, second: Any) -> Iterator[Any]:
    others = iter(second)
    for batch in first:
        try:
            next(others)
        except StopIteration:
            others = iter(second)
            next(others)
        yield batch


def now_and_then(first: Any, second: Any) -> Iterator[Any]:
    others = iter(second)
    for number, batch in enumerate(first):
        if number == 1:
            next(others)
        yield batch


def nested(first: Any, second: Any) -> Iterator[Any]:
    for _ in second:
        yield from first


def nested_at_the_end(first: Any, second: Any) -> Iterator[Any]:
    for number, batch in enumerate(second, 1):
        if number < len(second):
            yield batch
        else:
            yield from first


def gradients(loop: Callable[[Any, Any], Iterator[Any]], counts: tuple[int, int], num_steps: int) -> list[float]:
    """Return the gradient of each update: the mean over the numbers of its window."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, first, second = accelerator.prepare(model, optimizer, *map(numbers, counts))
    found = []
    for batch in loop(first, second):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                found.append(next(model.parameters()).grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("loop", [zipped, zipped_last, endless])
def test_window_ends_with_the_shortest_of_loaders_read_side_by_side(
    ranks: Sessions, num_ranks: int, loop: Callable[[Any, Any], Iterator[Any]]
) -> None:
    second = 40 if loop is not endless else 4  # which is read several times
    for found in ranks.run(num_ranks, gradients, loop, (num_ranks * 6, num_ranks * second), 2):
        assert found == ([2.5, 5.5] if num_ranks == 1 else [4.5, 10.5])


def test_iterator_that_is_drawn_from_now_and_then_ends_no_window() -> None:
    assert gradients(now_and_then, (10, 4), 3) == [3.5, 8.5]


@pytest.mark.parametrize("outer", [2, 4, 6])
def test_loop_inside_a_loop_ends_windows_with_the_inner_loader(outer: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradients(nested, (10, outer), 3) == [3.5, 8.5] * (outer // 2)


def test_loop_inside_the_last_round_of_a_loop_keeps_windows_of_full_length() -> None:
    assert gradients(nested_at_the_end, (12, 8), 3) == [3.5, 3.5, 9.5]


def test_loaders_side_by_side_that_count_other_samples_get_a_warning() -> None:
    with pytest.warns(
        UserWarning, match="two prepared loaders are read side by side, and one of them has a batch that"
    ):
        gradients(zipped, (7, 40), 2)
