"""Indices in tensors: the numbers of torch's samplers in their order, drawn alike, without a list of all."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from notebook_launcher import Accelerator
from notebook_launcher.training.data import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler, samplers
from notebook_launcher.training.data.loader import move, without_label
from notebook_launcher.training.data.samplers import indices_of
from notebook_launcher.training.data.sharding import shares_of

LENGTHS = [1, 2, 3, 33, 2047, 2048, 2049, 2050, 7000]


@pytest.fixture
def gradual(monkeypatch):
    """Let every permutation come in pieces."""
    monkeypatch.setattr(samplers, "GRADUAL_FROM", 2)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shared", [True, False])
def test_permutation_in_pieces_is_torchs(gradual, length, shared):
    theirs, ours, advanced = (torch.Generator().manual_seed(length) for _ in range(3))
    expected = torch.randperm(length, generator=theirs)
    pieces = samplers.permutation(length, ours, shared=shared)
    first = next(pieces)
    if shared:
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert torch.cat([first, *pieces]).tolist() == expected.tolist()
    assert torch.equal(ours.get_state(), theirs.get_state())
    samplers.advance(advanced, length)
    assert torch.equal(advanced.get_state(), theirs.get_state())


def test_permutation_draws_from_torchs_generator(gradual):
    torch.manual_seed(4)
    expected = torch.randperm(5000), torch.get_rng_state()
    torch.manual_seed(4)
    assert torch.cat(list(samplers.permutation(5000, None))).tolist() == expected[0].tolist()
    assert torch.equal(torch.get_rng_state(), expected[1])


class Rows(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Any] = {
    "range": lambda: range(3, 300, 7),
    "sequential": lambda: SequentialSampler(range(100)),
    "random": lambda: RandomSampler(range(100)),
    "random, generator": lambda: RandomSampler(range(100), generator=seeded(1)),
    "random, fewer": lambda: RandomSampler(range(100), num_samples=30, generator=seeded(2)),
    "random, more": lambda: RandomSampler(range(100), num_samples=230, generator=seeded(3)),
    "seedable": lambda: SeedableRandomSampler(range(100), data_seed=4),
    "weighted": lambda: WeightedRandomSampler([0.1, 0.2, 0.7], 50, generator=seeded(5)),
    "distributed": lambda: DistributedSampler(Rows(100), 3, 2, seed=6),
    "distributed, dropping": lambda: DistributedSampler(Rows(100), 3, 1, shuffle=False, drop_last=True),
    "distributed, few": lambda: DistributedSampler(Rows(2), 7, 6),
}


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize("name", SAMPLERS)
def test_indices_are_those_of_the_sampler(request, name, pieces):
    if pieces:
        request.getfixturevalue("gradual")
    theirs, ours = SAMPLERS[name](), SAMPLERS[name]()
    for _ in range(2):
        torch.manual_seed(9)
        expected, state = list(theirs), torch.get_rng_state()
        torch.manual_seed(9)
        stream = indices_of(ours)
        assert stream is not None
        assert stream.left == len(expected)
        taken = [stream.take(count).tolist() for count in (1, 0, 7, 10**6, 1)]
        assert list(itertools.chain(*taken)) == expected
        assert torch.equal(torch.get_rng_state(), state)
        if getattr(ours, "generator", None) is not None:
            assert torch.equal(ours.generator.get_state(), theirs.generator.get_state())
        assert getattr(ours, "epoch", 0) == getattr(theirs, "epoch", 0)


def test_other_samplers_draw_for_themselves():
    class Reversed(SequentialSampler):
        def __iter__(self):
            return iter(range(len(self) - 1, -1, -1))

    assert indices_of(Reversed(range(4))) is None
    assert indices_of(RandomSampler(range(4), replacement=True)) is None
    assert [share.indices for share in shares_of(BatchSampler(Reversed(range(3)), 2, drop_last=False))] == [[2, 1], [0]]


class ByItself(BatchSampler):
    """A batch sampler that is not known to be torch's own, so that its batches are read one by one."""


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("even", "uneven"), [(True, "leave"), (False, "weigh"), (False, "stop"), (False, "leave")])
@pytest.mark.parametrize("drop_last", [True, False])
def test_stretches_are_the_rounds_that_are_read_one_by_one(num_processes, split, even, uneven, drop_last):
    for length, skip, left_out in itertools.product((0, 5, 6, 11, 12, 13, 25, 900), (0, 1, 6, 12), (0, 2)):
        for rank in range(num_processes):
            fast, slow = (
                SkipBatchSampler(
                    BatchSamplerShard(
                        kind(range(length), 6, drop_last), num_processes, rank, split, even, uneven=uneven
                    ),
                    left_out,
                )
                for kind in (BatchSampler, ByItself)
            )
            assert list(fast.shares(skip)) == list(slow.shares(skip))


@pytest.mark.parametrize("batch_size", [32, None])
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_list_of_all_indices_is_made(batch_size, shuffle):
    rows = Rows(10**6)
    loader = Accelerator(cpu=True).prepare(DataLoader(rows, batch_size, shuffle=shuffle))
    tracemalloc.start()
    try:
        batches = list(itertools.islice(loader, 200))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(batches) == 200
    assert peak < 2e6, "a list of 10^6 integers takes 36 MB"


@pytest.mark.usefixtures("gradual")
def test_shuffled_loader_yields_torchs_batches_and_resumes():
    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(5000), 7, shuffle=True, generator=seeded(3))

    def lists(batches: Any) -> list[list[int]]:
        return [batch.tolist() for batch in batches]

    theirs, ours = loader(), Accelerator(cpu=True).prepare(loader())
    epochs = [lists(theirs) for _ in range(2)]
    begun = iter(ours)
    head = lists(itertools.islice(begun, 300))
    state = ours.state_dict()
    begun.close()
    resumed = Accelerator(cpu=True).prepare(loader())
    resumed.load_state_dict(state)
    assert head + lists(resumed) == epochs[0]
    assert lists(resumed) == epochs[1]


def test_profiler_sees_the_loader():
    loader = Accelerator(cpu=True).prepare(DataLoader(Rows(8), 4))
    with torch.autograd.profiler.profile() as profile:
        list(loader)
    assert any("enumerate(DataLoader)" in event.key for event in profile.key_averages())


def test_tensors_that_are_in_place_are_not_copied():
    batch = [torch.ones(2), torch.zeros(1)]
    cpu = torch.device("cpu")
    assert move(batch, cpu, non_blocking=False) is batch
    meta = move(batch, torch.device("meta"), non_blocking=False)
    assert [part.device.type for part in meta] == ["meta", "meta"]
    assert move([torch.ones(2, device="meta"), "name"], torch.device("meta"), non_blocking=False)[1] == "name"


def test_iterator_with_a_next_of_its_own_is_read_as_it_is():
    class Counting(_SingleProcessDataLoaderIter):
        count = 0

        def __next__(self):
            self.count += 1
            return super().__next__()

    iterator = Counting(DataLoader(list(range(6)), batch_size=2))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in without_label(iterator)] == [[0, 1], [2, 3], [4, 5]]
    assert iterator.count == 4  # with the one that ends it
