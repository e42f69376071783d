"""Checkpoints taken in the middle of an epoch: the data go on where they were, in the same order."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.plugins import DataLoaderConfiguration
from notebook_launcher.training.random import set_seed

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stream(IterableDataset[torch.Tensor]):
    """Numbers that come one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(self.length)).view(-1, 1))


class Training:
    """Two epochs over 23 or 24 numbers in batches of two, with dropout, in windows of three micro-batches."""

    def __init__(self, seed: int, kind: str = "shuffled", **options: Any) -> None:
        config = DataLoaderConfiguration(
            dispatch_batches=True if kind == "dispatched" else None, use_seedable_sampler=kind == "seedable", **options
        )
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, dataloader_config=config)
        set_seed(seed)
        # What rank 0 reads for all divides evenly: it fills a last round with what it happened to read first.
        length = 24 if kind in ("dispatched", "stream") else 23
        data: Any = Stream(length) if kind == "stream" else torch.arange(float(length)).view(-1, 1)
        workers = 2 if kind == "workers" else 0
        loader = DataLoader(data, batch_size=2, shuffle=kind != "stream", num_workers=workers)
        model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        self.loader, self.model, self.optimizer = self.accelerator.prepare(loader, model, optimizer)
        self.seen: list[list[float]] = []
        self.epoch = 0

    def train(self, *, stop_after: int | None = None) -> None:
        """Go on to the end of the second epoch, or stop in the middle after so many batches of it."""
        while self.epoch < 2:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(batch + random.random()).square().mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.seen.append(batch.flatten().tolist())
                if len(self.seen) == stop_after:
                    return
            self.epoch += 1

    def everything(self) -> str:
        """All of it on this rank, down to the last bit."""
        weights = [tensor.tolist() for tensor in self.accelerator.unwrap_model(self.model).state_dict().values()]
        moments = [tensor.tolist() for one in self.optimizer.state_dict()["state"].values() for tensor in one.values()]
        return repr((self.seen, weights, moments, random.random(), torch.rand(2).tolist()))


def interrupt_and_go_on(folder: Any, kind: str, stop_after: int) -> tuple[str, str, list[list[float]]]:
    """Train once through, and once with a checkpoint in between; return both outcomes, and the batches up to it."""
    through = Training(1, kind)
    through.train()
    expected = through.everything()
    first = Training(1, kind)
    first.train(stop_after=stop_after)
    first.accelerator.save_state(folder)
    second = Training(2, kind)
    second.accelerator.load_state(folder)
    seen = list(first.seen)
    second.seen, second.epoch = first.seen, first.epoch
    second.train()
    return expected, second.everything(), seen


# In one process, torch's workers leave a signal handler behind.
@pytest.mark.parametrize(
    ("kind", "num_processes", "stop_after"),
    [
        *itertools.product(["shuffled", "seedable", "dispatched", "stream"], [1], [5]),
        *itertools.product(["shuffled", "seedable", "dispatched", "stream", "workers"], [2], [2, 8]),
    ],
)
def test_resumed_epoch_equals_uninterrupted_epoch_on_every_rank(ranks, tmp_path, kind, num_processes, stop_after):
    outcomes = ranks.run(num_processes, interrupt_and_go_on, tmp_path / "a", kind, stop_after)
    for expected, found, _ in outcomes:
        assert found == expected
    if (kind, num_processes, stop_after) == ("shuffled", 2, 2):  # One rank resumes with the rest of the data.
        alone = Training(2)
        alone.accelerator.load_state(tmp_path / "a")
        rest = [number for batch in alone.loader for number in batch.flatten().tolist()]
        first = [number for *_, seen in outcomes for batch in seen for number in batch]
        assert sorted(first + rest) == [float(number) for number in range(23)]


def test_different_loaders_start_at_their_beginning_with_a_warning(tmp_path):
    training = Training(1)
    training.train(stop_after=3)
    training.accelerator.save_state(tmp_path / "a")
    other = Training(2)
    other.accelerator.prepare(DataLoader(Stream(4)))
    with pytest.warns(UserWarning, match="holds the positions of 1 loaders, and 2 are prepared here: they start from"):
        other.accelerator.load_state(tmp_path / "a")
    assert sum(1 for _ in other.loader) == 12


def evaluate(training: Training, evaluation: Any, way: str) -> list[float]:
    """Return what an evaluation of two batches has seen."""
    seen: list[float] = []
    training.model.train(way != "mode")
    with torch.no_grad() if way == "no_grad" else contextlib.nullcontext():
        for batch in evaluation:
            with torch.no_grad():
                training.model(batch)
            seen += batch.flatten().tolist()
            if len(seen) >= 4:
                break
    training.model.train()
    return seen


@pytest.mark.parametrize(("way", "is_nested"), [("mode", False), ("mode", True), ("no_grad", False), ("no_grad", True)])
def test_evaluation_that_was_left_begins_at_its_start(tmp_path, way, is_nested):
    first, second = Training(1), Training(2)
    numbers = torch.arange(12.0).view(-1, 1)
    loaders = [one.accelerator.prepare(DataLoader(numbers, batch_size=2)) for one in (first, second)]  # type: ignore[arg-type]
    loop = iter(first.loader)
    if is_nested:
        next(loop)
    evaluate(first, loaders[0], way)
    first.accelerator.save_state(tmp_path / "a")
    second.accelerator.load_state(tmp_path / "a")
    assert evaluate(second, loaders[1], way) == [0.0, 1.0, 2.0, 3.0]
    assert sum(1 for _ in second.loader) == (11 if is_nested else 12)
    loop.close()


@pytest.mark.parametrize("way", ["stateful evaluation", "training of a model that evaluated meanwhile"])
def test_loop_that_was_left_continues(tmp_path, way):
    is_evaluation = way == "stateful evaluation"
    first, second = (Training(seed, use_stateful_dataloader=is_evaluation) for seed in (1, 2))
    first.model.train(is_evaluation)
    with torch.no_grad() if is_evaluation else contextlib.nullcontext():
        for batch in first.loader:  # noqa: B007 - a loop that is left
            first.model.train()
            break
    first.accelerator.save_state(tmp_path / "a")
    second.accelerator.load_state(tmp_path / "a")
    numbers = torch.cat([batch, *second.loader]).flatten().tolist()
    assert len(numbers) == 23
    assert set(numbers) == set(range(23))


@pytest.mark.parametrize("place", ["after the step", "after zero_grad"])
def test_checkpoint_inside_the_block_that_ends_a_window_has_no_open_window(tmp_path, place):
    def train(training: Training, *, saves: bool) -> None:
        for number, batch in enumerate(training.loader, 1):
            with training.accelerator.accumulate(training.model):
                training.accelerator.backward(training.model(batch).square().mean())
                training.optimizer.step()
                for here in ("after the step", "after zero_grad"):
                    if saves and number == 6 and here == place:
                        training.accelerator.save_state(tmp_path / "a")
                    training.optimizer.zero_grad()

    first = Training(1)
    train(first, saves=True)
    expected, second = first.everything(), Training(2)
    second.accelerator.load_state(tmp_path / "a")
    assert second.accelerator.sync_gradients
    train(second, saves=False)
    assert second.everything() == expected
