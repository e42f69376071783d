"""Batches of which the loader cannot know the rows, and loops that hide batches from it: exact, or a warning."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from notebook_launcher import Accelerator
from tests.support.toy_training import Sessions, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = [1, 3, 2, 3, 1, 2, 3]


class Bags(Dataset[Any]):
    """Ready batches of different sizes; or also single samples between them, without a dimension for rows."""

    def __init__(self, *, has_samples: bool = False) -> None:
        self.has_samples = has_samples

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, at: int) -> torch.Tensor:
        shape = () if self.has_samples and SIZES[at] == 1 else (SIZES[at], 1)
        return torch.full(shape, float(at + 1))


class StreamOfBags(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (Bags()[at] for at in range(len(SIZES)))


def buckets() -> list[list[int]]:
    """Return batches of different sizes, as bucketing by length makes them, without a `batch_size`."""
    ends = list(itertools.accumulate(SIZES))
    return [list(range(end - size, end)) for size, end in zip(SIZES, ends, strict=True)]


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "buckets": lambda: DataLoader(torch.arange(15.0).view(-1, 1), batch_sampler=buckets()),  # type: ignore[arg-type]
    "bags": lambda: DataLoader(Bags(), batch_size=None),
    "samples and bags": lambda: DataLoader(Bags(has_samples=True), batch_size=None),
    "a stream of bags": lambda: DataLoader(StreamOfBags(), batch_size=None),
}


def gradients(kind: str, num_steps: int) -> list[tuple[float, float]]:
    """Return the gradient of each update and the mean over the rows of its window on all ranks."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, LOADERS[kind]())
    found: list[tuple[float, float]] = []
    total, rows = torch.zeros(()), 0
    for one in loader:
        batch = one.view(-1, 1)
        with accelerator.accumulate(model):
            total, rows = total + batch.sum(), rows + len(batch)
            accelerator.backward(model(batch).mean())
            optimizer.step()
            if accelerator.sync_gradients:
                sums = accelerator.reduce(torch.stack([total, torch.tensor(float(rows))]))
                found.append((float(next(model.parameters()).grad), float(sums[0] / sums[1])))
                total, rows = torch.zeros(()), 0
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize(("kind", "num_steps"), list(zip(LOADERS, (1, 2, 3, 2), strict=True)))
def test_batches_of_any_size_weigh_their_rows(ranks: Sessions, kind: str, num_steps: int) -> None:
    for found in (gradients(kind, num_steps), *ranks.run(2, gradients, kind, num_steps)):
        assert len(found) > 1
        assert [gradient for gradient, _ in found] == pytest.approx([mean for _, mean in found], abs=1e-6)


def rows(number: int) -> Any:
    """Return an unprepared loader of so many samples, two in a batch."""
    samples: Any = torch.ones(number, 1)
    return DataLoader(samples, batch_size=2)


def train(loader: Any, *, num_steps: int = 2, reads_ahead: bool = False) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with torch.no_grad():
        for batch in loader:  # An evaluation, which needs no accumulate().
            model(batch)
    fit(accelerator, model, optimizer, list(loader) if reads_ahead else loader)


def fit(accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, *, stop: int = 0) -> None:
    for at, batch in enumerate(batches, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if at == stop:
            break


def test_rows_that_vary_against_the_samples_that_are_counted_get_a_warning() -> None:
    joined: Any = DataLoader(Bags(), batch_size=1, collate_fn=lambda bags: bags[0])
    with pytest.warns(
        UserWarning, match="1 row for 1 sample and one with 3 rows for 1 sample, and a micro-batch weighs"
    ):
        train(joined)
    bags: Any = torch.ones(8, 2, 1)
    alike = DataLoader(bags, batch_size=2, collate_fn=torch.cat)
    train(alike)
    train(DataLoader(Bags(), batch_size=1, collate_fn=lambda bags: bags[0]), num_steps=1)


@pytest.mark.parametrize("collate", [list, lambda samples: tuple(zip(*samples, strict=True))], ids=["list", "zip"])
def test_lists_of_samples_are_not_taken_for_rows(collate: Callable[[list[Any]], Any]) -> None:
    """As of images of several channels, and their boxes."""
    images: Any = [(torch.ones(3, 2), {"boxes": torch.ones(4, 1)}) for _ in range(5)]
    loader: Any = Accelerator(cpu=True).prepare(DataLoader(images, batch_size=2, collate_fn=collate))
    for _ in loader:
        assert loader.counts_otherwise == ""


def test_loop_over_a_list_of_all_batches_gets_a_warning() -> None:
    with pytest.warns(
        UserWarning, match=r"a loop that read all batches of the prepared loader, as list\(loader\) does"
    ):
        train(rows(5), reads_ahead=True)


def test_windows_of_different_lengths_on_the_ranks_are_an_error(ranks: Sessions) -> None:
    expected = r"update 1: gradient_accumulation_steps differs between the ranks: 3 on rank 0, 2 on rank 1\."
    with pytest.raises(RuntimeError, match=expected):
        ranks.run(2, lambda: train(rows(24), num_steps=3 - torch.distributed.get_rank()))


@pytest.mark.parametrize(("stop", "rate"), [(4, 0.001), (3, 1.0)])
def test_scheduler_that_is_stepped_after_a_loop_was_left_inside_a_window_warns(stop: int, rate: float) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    loader = rows(16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def loops() -> None:
        for _ in range(3):
            fit(accelerator, model, optimizer, loader, stop=stop)
            scheduler.step()

    _, texts = recorded(loops)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert sum("scheduler.step() did not advance" in text for text in texts) == (stop == 3)
