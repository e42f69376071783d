"""Loops over prepared loaders: several of them, one that is read ahead, and batches that are cut."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from tests.support.toy_training import Sessions, numbers, one_weight, sessions_fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ranks = sessions_fixture(1, 2)


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


def train(loop: Callable[..., Iterator[Any]], *loaders: Any, num_steps: int = 2, weighs: bool = False) -> Any:
    """Return the gradient of each update, to nine digits: the mean over the numbers of its window."""
    plugin = GradientAccumulationPlugin(num_steps=num_steps, sync_with_dataloader=not weighs)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, *prepared = accelerator.prepare(model, optimizer, *loaders)
    found = []
    for batch in loop(*prepared):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean(), weight=len(batch) if weighs else None)
            if accelerator.sync_gradients:
                found.append(round(next(model.parameters()).grad.item(), 9))
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("loop", [zipped, zipped_last, endless])
def test_window_ends_with_the_shortest_of_loaders_read_side_by_side(
    ranks: Sessions, num_ranks: int, loop: Callable[[Any, Any], Iterator[Any]]
) -> None:
    second = 40 if loop is not endless else 4  # which is read several times
    for found in ranks.run(num_ranks, train, loop, numbers(num_ranks * 6, 2), numbers(num_ranks * second, 2)):
        assert found == ([2.5, 5.5] if num_ranks == 1 else [4.5, 10.5])


@pytest.mark.parametrize(("loop", "first", "second", "expected"), [
    (now_and_then, 10, 4, [3.5, 8.5]),
    (nested, 10, 2, [3.5, 8.5]), (nested, 10, 4, [3.5, 8.5] * 2), (nested, 10, 6, [3.5, 8.5] * 3),
    (nested_at_the_end, 12, 8, [3.5, 3.5, 9.5]),
])  # fmt: skip
def test_loaders_that_are_not_read_side_by_side_end_their_own_windows_alone(
    loop: Callable[[Any, Any], Iterator[Any]], first: int, second: int, expected: list[float]
) -> None:
    assert train(loop, numbers(first, 2), numbers(second, 2), num_steps=3) == expected


def test_loaders_side_by_side_that_count_other_samples_get_a_warning() -> None:
    with pytest.warns(UserWarning, match="two prepared loaders are read side by side, and one of them has a batch"):
        train(zipped, numbers(7, 2), numbers(40, 2))


# Loops that read a prepared loader ahead, or cut its batches, are warned; what they need instead is exact.


WARNING = r"accumulate\(\) was entered without a new batch from the prepared loader"


def read_in_order(loader: Iterable[Any]) -> Iterator[Any]:
    yield from loader


def read_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        yield batch


def read_chunks(loader: Iterable[Any]) -> Iterator[Any]:
    batches = iter(loader)
    while chunk := list(itertools.islice(batches, 2)):
        yield from chunk


def cut_batches(loader: Iterable[Any]) -> Iterator[Any]:
    for batch in loader:
        yield from batch.split((1, len(batch) - 1)) if len(batch) > 1 else [batch]


def leave_some_out(loader: Iterable[Any]) -> Iterator[Any]:
    yield from (batch for number, batch in enumerate(loader) if number != 2)


@pytest.mark.parametrize(("read", "batch_size"), [(read_ahead, 1), (read_chunks, 1), (cut_batches, 3)])
def test_loop_that_is_out_of_step_with_its_loader_warns(read: Any, batch_size: int) -> None:
    with pytest.warns(UserWarning, match=WARNING):
        train(read, numbers(12, batch_size))


def test_weights_and_windows_apart_from_the_loader_are_exact_in_any_order_of_reading() -> None:
    assert train(read_ahead, numbers(12), weighs=True) == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5]
    assert train(cut_batches, numbers(12, 3), weighs=True) == [2.0, 5.0, 8.0, 11.0]


def test_loop_in_step_with_its_loader_is_not_warned() -> None:
    train(leave_some_out, numbers(12))
    train(cut_batches, numbers(12), num_steps=1)


def test_batch_that_is_tried_again_is_not_warned() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(one_weight(), numbers(12))
    for number, batch in enumerate(loader):
        if number == 2:
            with pytest.raises(OSError), accelerator.accumulate(model):
                raise OSError
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                model.zero_grad()


def read_all(loader: Iterable[Any]) -> Iterator[Any]:
    yield from list(loader)


READINGS = {"in order": read_in_order, "one ahead": read_ahead, "two at a time": read_chunks, "all": read_all}


def test_reading_ahead_is_exact_where_a_rank_has_no_last_batch(ranks: Sessions) -> None:
    """Rank 1 has a batch less than rank 0, and gets one again with weight 0: in whichever micro-batch that comes."""

    def train_ahead(read: Callable[..., Iterator[Any]]) -> float:
        plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
        uneven = DataLoaderConfiguration(even_batches=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, dataloader_config=uneven)
        model, loader, other = accelerator.prepare(one_weight(), numbers(13, 2), numbers(13, 2))
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number, batch in enumerate(read(loader)):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean(), weight=len(batch))
                    optimizer.step()
                    optimizer.zero_grad()
                if number == 1:
                    with torch.no_grad():
                        seen = [accelerator.gather_for_metrics(rows) for rows in other]
        assert torch.cat(seen).flatten().tolist() == list(range(1, 14))
        return float(accelerator.unwrap_model(model).weight.item())

    found = ranks.run(2, lambda: {name: train_ahead(read) for name, read in READINGS.items()})
    # Two windows, of 8 and of 5 rows: their means are 4.5 and 11.
    assert list(found) == [dict.fromkeys(READINGS, pytest.approx(1 - 15.5))] * 2
