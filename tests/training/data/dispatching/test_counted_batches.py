"""Batches of any form that rank 0 deals out: their samples are counted before `collate_fn` joins them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from notebook_launcher import Accelerator
from notebook_launcher.training.data import Round
from notebook_launcher.training.data.dispatching import Portions
from notebook_launcher.training.data.rows import CountedBatch, CountingCollate
from tests.support.toy_training import Sessions, sessions_fixture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ranks = sessions_fixture(2)
NUM_SAMPLES = 7


def sample(number: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return an image of its own size, and boxes."""
    return torch.full((1 + number % 3, 2), float(number)), {"boxes": torch.zeros(1 + number % 2, 4)}


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> Any:
        return sample(number)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from map(sample, range(NUM_SAMPLES))


def detection(samples: Sequence[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def listed(samples: Sequence[Any]) -> Any:
    return list(samples)


def arrays(samples: Sequence[Any]) -> Any:
    return np.array([image.mean().item() for image, _ in samples])


def packed(samples: Sequence[Any]) -> Any:
    return {
        "values": torch.cat([image for image, _ in samples]),
        "sizes": torch.tensor([len(sample[0]) for sample in samples]),
    }


def numbers_of(batch: Any) -> list[float]:
    """Return the numbers of a batch's samples, whatever its form."""
    if isinstance(batch, np.ndarray):
        return [float(number) for number in batch]
    if isinstance(batch, dict):
        return [part.mean().item() for part in torch.split(batch["values"], batch["sizes"].tolist())]
    if isinstance(batch, tuple):
        return [image.mean().item() for image in batch[0]]
    return [image.mean().item() for image, _ in batch]


def train(loader: DataLoader[Any], options: dict[str, Any]) -> tuple[list[float], list[list[float]]]:
    """Return the gradient of each update, the mean over the round's numbers, and this rank's numbers."""
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    gradients, had = [], []
    for batch in loader:
        had.append(numbers_of(batch))
        accelerator.backward(model(torch.tensor(had[-1])[:, None]).mean())
        gradients.append(next(model.parameters()).grad.item())
        optimizer.zero_grad()
    return gradients, had


@pytest.mark.parametrize("collate", [detection, listed, arrays, packed])
@pytest.mark.parametrize(
    ("data", "options", "num_workers"), [(Stream, {}, 0), (Samples, {"dispatch_batches": True}, 1)]
)
def test_batches_of_any_form_weigh_their_samples(
    ranks: Sessions, collate: Callable[..., Any], data: Callable[[], Any], options: dict[str, Any], num_workers: int
) -> None:
    def run() -> tuple[list[float], list[list[float]]]:
        loader = DataLoader(data(), batch_size=2, collate_fn=collate, num_workers=num_workers)
        return train(loader, {**options, "even_batches": False})

    for rank, (gradients, had) in enumerate(ranks.run(2, run)):
        assert gradients == pytest.approx([1.5, 5.0])
        assert had == [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0]]][rank]


@pytest.mark.parametrize("collate", [arrays, packed])
def test_short_round_of_batches_that_cannot_be_cut_repeats_a_whole_one(
    ranks: Sessions, collate: Callable[..., Any]
) -> None:
    def run() -> tuple[list[float], list[list[float]]]:
        return train(DataLoader(Stream(), batch_size=3, collate_fn=collate), {})

    first, second = ranks.run(2, run)
    assert first[1] == [[0.0, 1.0, 2.0], [6.0]]
    assert second[1] == [[3.0, 4.0, 5.0], [6.0]]
    assert first[0] == pytest.approx([2.5, 6.0])


@dataclasses.dataclass
class Named:
    number: int


MADE: dict[str, Callable[[list[int]], Any]] = {
    "dictionaries": lambda ids: [{"id": number} for number in ids],
    "dictionaries of columns": lambda ids: [{"boxes": torch.full((6, 4), number)} for number in ids],
    "tuples": lambda ids: [(number, "n") for number in ids],
    "lists": lambda ids: [[number] * number for number in ids],
    "lists as long as the batch": lambda ids: [[number] * 6 for number in ids],
    "numbers": lambda ids: tuple(torch.tensor(number) for number in ids),
    "tensors of other lengths": lambda ids: [torch.arange(number) for number in ids],
    "objects": lambda ids: [frozenset([number]) for number in ids],
    "records": lambda ids: [Named(number) for number in ids],
    "objects, and none": lambda ids: [None if number % 2 else {"id": number} for number in ids],
    "nested": lambda ids: {"boxes": [torch.zeros(number, 4) for number in ids], "names": [[str(n)] for n in ids]},
    "beside parts of the batch": lambda ids: (torch.tensor(ids), {"task": "sum"}, [{"id": number} for number in ids]),
}


def with_column(make: Callable[[list[int]], Any], ids: list[int]) -> Any:
    return {"x": torch.tensor(ids), "rest": make(ids)}


@pytest.mark.parametrize("name", MADE)
def test_lists_with_an_item_for_each_sample_are_shared_out_with_it(name: str) -> None:
    collate = CountingCollate(lambda ids: with_column(MADE[name], list(ids)))
    shared: Any = (([6, 6, 4], {"split": True}), ([6, 6, 4], {"split": True, "even": False}), ([3, 3, 2], {}))
    for (sizes, options), num_processes in itertools.product(shared, (2, 3)):
        ends = list(itertools.accumulate(sizes))
        batches = [(collate(range(end - size, end)), end) for end, size in zip(ends, sizes, strict=True)]
        for parts, drawn, _ in Portions(num_processes=num_processes, **options).deal(batches):
            assert tuple(len(part["x"]) for part in parts) == drawn.rows
            for part in parts:
                assert repr(part) == repr(with_column(MADE[name], part["x"].tolist()))


def test_numbers_of_a_batch_stay_with_its_samples() -> None:
    collate = CountingCollate(lambda ids: {"x": torch.tensor(ids), "sum": sum(ids), "most": torch.tensor(max(ids))})
    batches = [(collate([0, 1, 2]), 3), (collate([3, 4, 5]), 6), (collate([6, 7, 8]), 9), (collate([9]), 10)]
    *_, (parts, drawn, _) = Portions(num_processes=2).deal(batches)
    assert [(part["x"].tolist(), part["sum"], part["most"]) for part in parts] == [([6, 7, 8], 21, 8), ([9], 9, 9)]
    assert drawn == Round((3, 1), (3, 1), (3, 1))


APART: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "samples as they are": (list, [(torch.zeros(2), {"id": at}) for at in range(2)]),
    "images beside boxes": (detection, [(torch.zeros(2, 2), {"boxes": torch.zeros(2, 4)}) for _ in range(2)]),
    "images in a dictionary": (lambda given: {"images": list(given)}, [torch.full((2,), at) for at in range(2)]),
    "three images of three channels": (lambda given: [image for image, _ in given], [(torch.zeros(3), 0)] * 3),
}


def test_a_list_of_what_samples_hold_has_an_item_for_each() -> None:
    found = {name: CountingCollate(collate)(samples) for name, (collate, samples) in APART.items()}
    assert {name: sorted(batch.lists) for name, batch in found.items()} == {
        "samples as they are": ["batch"],
        "images beside boxes": ["batch[0]", "batch[1]"],
        "images in a dictionary": ["batch['images']"],
        # One object three times: whose it is cannot be known, and so it is taken for three parts of the batch.
        "three images of three channels": [],
    }
    assert [batch.can_be_cut for batch in found.values()] == [True, True, True, False]


def test_two_tensors_in_a_batch_of_two_are_parts_of_it_or_may_be_either() -> None:
    def views(samples: Sequence[Any]) -> Any:
        return torch.stack(list(samples)), torch.zeros(len(samples))

    outermost = CountingCollate(views)([torch.zeros(3)] * 2)
    assert (outermost.lists, outermost.can_be_cut) == (frozenset(), True)
    inner = CountingCollate(lambda samples: {"views": list(views(samples))})
    assert inner([torch.zeros(3)] * 3).can_be_cut
    assert not inner([torch.zeros(3)] * 2).can_be_cut


def test_batch_that_must_be_cut_and_cannot_be_is_named() -> None:
    batches = [(CountedBatch(["a", "b", "c"], 3, can_be_cut=False), 3)]
    with pytest.raises(
        TypeError, match=r"A batch of 3 samples cannot be cut .*collate_fn made a list of which not every"
    ):
        list(Portions(num_processes=2, split=True, even=False).deal(batches))


def test_last_batch_that_cannot_be_shared_out_evenly_is_named() -> None:
    batches = [(CountedBatch(["a", "b", "c"], 3, can_be_cut=False), 3)]
    with pytest.raises(
        TypeError, match=r"last batch cannot be cut evenly .*: a list has no rows .*dispatch_batches=False"
    ):
        list(Portions(num_processes=2, split=True).deal(batches))
