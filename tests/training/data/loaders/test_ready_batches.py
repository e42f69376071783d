"""Batches of which the loader cannot know the rows, and loops that hide batches from it: exact, or a warning."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from notebook_launcher import Accelerator, Session
from tests.support.toy_training import session_fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = [1, 3, 2, 3, 1, 2, 3]
session = session_fixture(2)


class Bags(Dataset[Any]):
    """Ready batches of different sizes."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((SIZES[at], 1), float(at + 1))


class SamplesAndBags(Dataset[Any]):
    """Ready batches, and single samples without a dimension for rows between them."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor(float(at + 1)) if SIZES[at] == 1 else torch.full((SIZES[at], 1), float(at + 1))


class StreamOfBags(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        bags = Bags()
        yield from (bags[at] for at in range(len(bags)))


class Buckets:
    """Batches of different sizes, as bucketing by length makes them, without a `batch_size`."""

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in SIZES:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(SIZES)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "buckets": lambda: DataLoader(torch.arange(15.0).view(-1, 1), batch_sampler=Buckets()),  # type: ignore[arg-type]
    "bags": lambda: DataLoader(Bags(), batch_size=None),
    "samples and bags": lambda: DataLoader(SamplesAndBags(), batch_size=None),
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
def test_batches_of_any_size_weigh_their_rows(session: Session, kind: str, num_steps: int) -> None:
    for found in (gradients(kind, num_steps), *session.run(gradients, args=(kind, num_steps))):
        assert len(found) > 1
        assert [gradient for gradient, _ in found] == pytest.approx([mean for _, mean in found], abs=1e-6)


def rows(number: int) -> Any:
    """Return an unprepared loader of so many samples, two in a batch."""
    samples: Any = torch.ones(number, 1)
    return DataLoader(samples, batch_size=2)


def train(loader: Any, *, num_steps: int = 2, reads_ahead: bool = False) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with torch.no_grad():
        for batch in loader:  # An evaluation, which needs no accumulate().
            model(batch)
    for batch in list(loader) if reads_ahead else loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()


def test_rows_that_vary_against_the_samples_that_are_counted_get_a_warning() -> None:
    joined: Any = DataLoader(Bags(), batch_size=1, collate_fn=lambda bags: bags[0])
    with pytest.warns(
        UserWarning, match="1 row for 1 sample and one with 3 rows for 1 sample, and a micro-batch weighs"
    ):
        train(joined)
    bags: Any = torch.ones(8, 2, 1)
    alike = DataLoader(bags, batch_size=2, collate_fn=torch.cat)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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


def unequal_steps() -> None:
    rank = torch.distributed.get_rank()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3 - rank)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, rows(24))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()


def test_windows_of_different_lengths_on_the_ranks_are_an_error(session: Session) -> None:
    expected = r"update 1: gradient_accumulation_steps differs between the ranks: 3 on rank 0, 2 on rank 1\."
    with pytest.raises(RuntimeError, match=expected):
        session.run(unequal_steps)


@pytest.mark.parametrize(("stop", "rate"), [(4, 0.001), (3, 1.0)])
def test_scheduler_that_is_stepped_after_a_loop_was_left_inside_a_window_warns(stop: int, rate: float) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    loader = rows(16)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for at, batch in enumerate(loader, 1):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if at == stop:
                    break
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    given = [str(warning.message) for warning in caught if "scheduler.step() did not advance" in str(warning.message)]
    assert len(given) == (stop == 3)
