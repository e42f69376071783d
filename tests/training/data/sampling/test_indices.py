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

from notebook_launcher import Accelerator
from notebook_launcher.training.data import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler, samplers
from notebook_launcher.training.data.samplers import indices_of
from notebook_launcher.training.data.sharding import shares_of


@pytest.fixture
def gradual(monkeypatch):
    """Let every permutation come in pieces."""
    monkeypatch.setattr(samplers, "GRADUAL_FROM", 2)


@pytest.mark.parametrize("shared", [True, False])
def test_permutation_in_pieces_is_torchs(gradual, shared):
    for length in (1, 2, 3, 33, 2047, 2048, 2049, 2050, 7000):
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


@pytest.mark.parametrize(("even", "uneven"), [(True, "leave"), (False, "weigh"), (False, "stop"), (False, "leave")])
def test_stretches_are_the_rounds_that_are_read_one_by_one(even, uneven):
    kinds = itertools.product((1, 2, 3), (True, False), (True, False))
    lengths = itertools.product((0, 5, 12, 13, 25, 900), (0, 1, 12), (0, 2))
    for (num_processes, split, drop_last), (length, skip, left_out) in itertools.product(kinds, lengths):
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


@pytest.mark.parametrize(("batch_size", "shuffle"), [(32, True), (None, True), (32, False)])
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


def test_profiler_sees_the_loader():
    loader = Accelerator(cpu=True).prepare(DataLoader(Rows(8), 4))
    with torch.autograd.profiler.profile() as profile:
        list(loader)
    assert any("enumerate(DataLoader)" in event.key for event in profile.key_averages())
