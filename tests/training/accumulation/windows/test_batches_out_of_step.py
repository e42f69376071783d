"""Loops that read a prepared loader ahead, or cut its batches, are warned; what they need instead is exact."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

NUMBERS = torch.arange(1.0, 13.0, dtype=torch.float64)[:, None]
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


def train(read: Callable[..., Iterator[Any]], *, batch_size: int = 1, num_steps: int = 2, weighs: bool = False) -> Any:
    """Return the gradient of each update: the mean of the numbers in its window."""
    plugin = GradientAccumulationPlugin(num_steps=num_steps, sync_with_dataloader=not weighs)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    data: Any = NUMBERS
    loader = DataLoader(data, batch_size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
    gradients = []
    for batch in read(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean(), weight=len(batch) if weighs else None)
            if accelerator.sync_gradients:
                gradients.append(next(model.parameters()).grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize(("read", "batch_size"), [(read_ahead, 1), (read_chunks, 1), (cut_batches, 3)])
def test_loop_that_is_out_of_step_with_its_loader_warns(read: Any, batch_size: int) -> None:
    with pytest.warns(UserWarning, match=WARNING):
        train(read, batch_size=batch_size)


def test_weights_and_windows_apart_from_the_loader_are_exact_in_any_order_of_reading() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(read_ahead, weighs=True) == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5]
        assert train(cut_batches, batch_size=3, weighs=True) == [2.0, 5.0, 8.0, 11.0]


def test_loop_in_step_with_its_loader_is_not_warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(leave_some_out)
        train(cut_batches, num_steps=1)


def test_batch_that_is_tried_again_is_not_warned() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    data: Any = NUMBERS
    model, loader = accelerator.prepare(model, DataLoader(data, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, batch in enumerate(loader):
            for fails in [True, False] if number == 2 else [False]:
                with pytest.raises(OSError) if fails else warnings.catch_warnings(), accelerator.accumulate(model):
                    if fails:
                        raise OSError
                    accelerator.backward(model(batch).mean())
                    if accelerator.sync_gradients:
                        model.zero_grad()


def read_all(loader: Iterable[Any]) -> Iterator[Any]:
    yield from list(loader)


READINGS = {"in order": read_in_order, "one ahead": read_ahead, "two at a time": read_chunks, "all": read_all}


def test_reading_ahead_is_exact_where_a_rank_has_no_last_batch() -> None:
    """Rank 1 has a batch less than rank 0, and gets one again with weight 0: in whichever micro-batch that comes."""

    def train_ahead(read: Callable[..., Iterator[Any]]) -> float:
        plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
        uneven = DataLoaderConfiguration(even_batches=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, dataloader_config=uneven)
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        data: Any = torch.arange(13.0, dtype=torch.float64)[:, None]
        loader, other = DataLoader(data, batch_size=2), DataLoader(data, batch_size=2)
        model, loader, other = accelerator.prepare(model, loader, other)
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
        assert torch.cat(seen).flatten().tolist() == list(range(13))
        return float(accelerator.unwrap_model(model).weight.item())

    with Session(2, output="none", devices="cpu") as session:
        found = session.run(lambda: {name: train_ahead(read) for name, read in READINGS.items()})
    # Two windows, of 8 and of 5 rows.
    assert list(found) == [dict.fromkeys(READINGS, pytest.approx(-13.5))] * 2
