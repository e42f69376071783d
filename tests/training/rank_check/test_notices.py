"""Notices about ranks that may have diverged, in real launches, and the switch for all comparisons."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher import Accelerator, DataLoaderConfiguration, notebook_launch
from tests.support.toy_rank_check import ON_0, WEIGHTS, Training
from tests.support.toy_training import make_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest


class Shuffled:
    """Batches in an order of its own generator."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[2 * at, 2 * at + 1] for at in range(len(self))]
        self.generator.shuffle(batches)
        return iter(batches)


def draw_in_orders(*, differs: bool, trains: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    data: Any = torch.arange(16.0)[:, None]
    sampler: Any = Shuffled(accelerator.process_index if differs else 7)
    loader = DataLoader(data, batch_sampler=sampler)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for _ in range(2):
        for numbers in loader:
            if trains:
                accelerator.backward(model(numbers).mean())
                optimizer.step()
                optimizer.zero_grad()


class Share(IterableDataset[int]):
    """A stream that asked for its rank when it was made; a share that nothing shows."""

    def __init__(self, rank: int, *, differs: bool) -> None:
        self.place = [rank if differs else 0, 2]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.place[0], 8, self.place[1]))


def read_streams(*, differs: bool) -> None:
    for dispatch_batches in (None, False):
        loaders = DataLoaderConfiguration(dispatch_batches=dispatch_batches)
        accelerator = Accelerator(cpu=True, dataloader_config=loaders)
        loader = accelerator.prepare(DataLoader(Share(accelerator.process_index, differs=differs), batch_size=2))
        for _ in range(2):
            for numbers in loader:
                accelerator.gather_for_metrics(numbers)


class Random(IterableDataset[int]):
    """A stream in an order that Python's generator draws."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(16), 16))


def read_at_random(dispatch_batches: bool | None) -> set[int]:
    loaders = DataLoaderConfiguration(dispatch_batches=dispatch_batches)
    accelerator = Accelerator(cpu=True, dataloader_config=loaders)
    random.seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(Random(), batch_size=2))
    return {int(number) for numbers in loader for number in accelerator.gather_for_metrics(numbers)}


def read_a_loader(*, prepared: bool) -> None:
    training = Training()
    data = torch.utils.data.TensorDataset(*make_data(1))  # so that all ranks' batches are equal if it is prepared
    loader = torch.utils.data.DataLoader(data, 1)
    loader = training.accelerator.prepare(loader) if prepared else loader
    for _ in range(9):
        for inputs, targets in loader:
            training.accelerator.backward(torch.nn.functional.mse_loss(training.model(inputs), targets))
            training.optimizer.step()
            training.optimizer.zero_grad()


def train_another_model(how: str) -> None:
    training = Training()
    other: Any = torch.nn.Linear(3, 1)
    if how == "own DDP":
        other = torch.nn.parallel.DistributedDataParallel(other)
    optimizer: Any = torch.optim.SGD(other.parameters(), lr=0.1)
    if how == "prepared":
        other, optimizer = training.accelerator.prepare(other, optimizer)
    for number in range(9):
        other(torch.full((1, 3), 1.0 + number + training.rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step()


def launched(function: Callable[..., object], capfd: pytest.CaptureFixture[str], num_processes: int = 2) -> str:
    """Launch, and return what the cell shows."""
    notebook_launch(function, num_processes, output="rank0", runs_folder=None, threads_per_process=1)
    return capfd.readouterr().out


SAME = "all 2 ranks gave the model the same inputs"
OUTSIDE = "the weights that SGD updates differ between the ranks: neither the optimizer nor its model was prepared"
ORDER = "the sampler draws another order on rank 1 than on rank 0"
PLACE = "the data set differs between ranks: place is [0, 2] on rank 0 and [1, 2] on rank 1"
SAMPLES = "the stream gives other samples on rank 1 than on rank 0"


def test_what_differs_or_was_not_prepared_gives_a_notice(capfd: pytest.CaptureFixture[str]) -> None:
    def differ() -> None:
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        for data in (torch.arange(8)[rank::2], list(range(8))[rank::2], torch.arange(8), [(rank * 0.5, 1)] * 4):
            for _ in accelerator.prepare(DataLoader(data, batch_size=2)):  # type: ignore[arg-type]
                pass
        draw_in_orders(differs=True, trains=True)
        draw_in_orders(differs=True, trains=False)
        read_streams(differs=True)
        read_at_random(dispatch_batches=False)
        read_a_loader(prepared=False)
        train_another_model("forgotten")

    shown = launched(differ, capfd)
    assert [shown.count(text) for text in (ORDER, PLACE, SAMPLES)] == [2, 2, 2]  # A share is other samples, too.
    assert [shown.count(text) for text in (SAME, OUTSIDE)] == [1, 1]
    assert shown.count("the data set differs between ranks: it is ") == 2


def test_what_is_the_same_and_was_prepared_gives_none(capfd: pytest.CaptureFixture[str]) -> None:
    def agree() -> None:
        draw_in_orders(differs=False, trains=True)
        read_streams(differs=False)
        for dispatch_batches in (None, True):
            assert read_at_random(dispatch_batches) == set(range(16))
        read_a_loader(prepared=True)
        train_another_model("own DDP")
        train_another_model("prepared")

    shown = launched(agree, capfd) + launched(lambda: read_a_loader(prepared=False), capfd, 1)
    assert [shown.count(text) for text in (ORDER, PLACE, SAMPLES, SAME, OUTSIDE)] == [0] * 5


def test_weights_that_differ_by_rounding_give_one_notice(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        training = Training()
        with torch.no_grad():
            if training.rank == 1:
                training.last.copy_(torch.nextafter(training.last, training.last + 1))
        training.steps(4)

    shown = launched(train, capfd)
    assert shown.count(f"update 1: {WEIGHTS} 1 {ON_0} by rounding alone") == 1
    assert shown.count("by rounding") == 1


def test_code_wins_over_the_launch() -> None:
    def look() -> list[bool]:
        return [Accelerator(cpu=True, check_ranks=code).rank_check is not None for code in (None, True)]

    assert notebook_launch(look, 2, check_ranks=False, output="none")[0] == [False, True]
