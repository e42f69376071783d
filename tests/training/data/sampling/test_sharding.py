"""Shares of batch samplers and iterable data sets: as Accelerate cuts them, and what all ranks have in each round."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from notebook_launcher import Accelerator
from notebook_launcher.training.data.iterables import IterableDatasetShard
from notebook_launcher.training.data.rows import Round
from notebook_launcher.training.data.samplers import SeedableRandomSampler
from notebook_launcher.training.data.sharding import BatchSamplerShard, SkipBatchSampler, batches_of
from tests.support.toy_loaders import SizedStream

SIZES = range(30)
POLICIES = [(True, "leave"), (False, "weigh"), (False, "stop"), (False, "leave")]


def varying(seed: int) -> list[list[int]]:
    """Batches of one to four samples, counted on."""
    generator, count = random.Random(seed), itertools.count()
    return [[next(count) for _ in range(generator.randint(1, 4))] for _ in range(generator.randint(0, 9))]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("split", [True, False])
def test_samples_are_shared_out_as_accelerate_does(num_processes, split):
    from accelerate import data_loader as theirs

    kinds = itertools.product((True, False), (True, False))
    for (even, drop_last), size, batch_size, rank in itertools.product(kinds, SIZES, range(1, 7), range(num_processes)):
        if split and batch_size % num_processes:
            continue
        sampler = BatchSampler(range(size), batch_size, drop_last)
        wanted, found = (
            kind(sampler, num_processes, rank, split, even) for kind in (theirs.BatchSamplerShard, BatchSamplerShard)
        )
        assert (list(found), len(found), found.total_length) == (list(wanted), len(wanted), wanted.total_length)
        if not even:  # which Accelerate's share of a stream does not know
            continue
        arguments = SizedStream(size), batch_size, drop_last, num_processes, rank, split
        stream = IterableDatasetShard(*arguments)
        assert list(stream) == list(theirs.IterableDatasetShard(*arguments)), (size, batch_size, rank)
        assert len(stream) == len(list(stream))  # Accelerate's own is too long with split_batches.


@pytest.mark.parametrize(("num_processes", "even"), [(1, True), (2, False), (3, True), (4, False)])
def test_batches_of_varying_size_are_shared_out_as_accelerate_does(num_processes, even):
    from accelerate.data_loader import BatchSamplerShard as Theirs

    for seed, rank in itertools.product(range(60), range(num_processes)):
        theirs, ours = (
            kind(varying(seed), num_processes, rank, even_batches=even)  # type: ignore[arg-type, unused-ignore]
            for kind in (Theirs, BatchSamplerShard)
        )
        assert (list(ours), len(ours)) == (list(theirs), len(theirs)), (varying(seed), rank)


@pytest.mark.parametrize(("even", "uneven"), POLICIES)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_every_rank_knows_what_all_have(num_processes, split, even, uneven):
    for size, batch_size in itertools.product(SIZES, (num_processes, 2 * num_processes)):
        sampler = BatchSampler(range(size), batch_size, drop_last=False)
        ranks = [
            list(BatchSamplerShard(sampler, num_processes, rank, split, even, uneven=uneven).shares())
            for rank in range(num_processes)
        ]
        check_rounds(ranks, list(range(size)), everything=uneven != "stop" or even)
        assert len({len(shares) for shares in ranks}) == 1


def check_rounds(ranks: list[list[Any]], samples: list[int], *, everything: bool) -> None:
    """Check that the ranks' views agree, and that what is real is each sample once, in order."""
    seen: list[int] = []
    for shares in zip(*ranks, strict=True):
        (drawn,) = {share.round for share in shares}
        for rank, share in enumerate(shares):
            indices = share.indices or []
            assert len(indices) == drawn.rows[rank]
            assert drawn.weights[rank] in (0, drawn.rows[rank])
            assert drawn.real[rank] <= drawn.weights[rank]
            seen += indices[: drawn.real[rank]]
        assert {share.samples for share in shares} == {len(seen)}
    assert seen == samples if everything else seen == samples[: len(seen)]


@pytest.mark.parametrize(
    ("uneven", "batches", "last"),
    [
        ("weigh", [[[0, 1], [4]], [[2, 3], [2, 3]]], Round((1, 2), (1, 0), (1, 0))),
        ("leave", [[[0, 1], [4]], [[2, 3]]], Round((1, 0), (1, 0), (1, 0))),
        ("stop", [[[0, 1]], [[2, 3]]], Round((2, 2), (2, 2), (2, 2))),
    ],
)
def test_ranks_that_have_run_out_follow_the_policy(uneven, batches, last):
    sampler = BatchSampler(range(5), 2, drop_last=False)
    shards = [BatchSamplerShard(sampler, 2, rank, even_batches=False, uneven=uneven) for rank in range(2)]
    assert [list(shard) for shard in shards] == batches
    assert [len(shard) for shard in shards] == [len(batch) for batch in batches]
    assert list(shards[0].shares())[-1].round == last


def test_rank_that_never_had_a_batch_gets_anothers_and_samples_that_even_out_count_and_are_not_real():
    (share,) = BatchSamplerShard(BatchSampler(range(3), 4, drop_last=False), 2, 1).shares()
    assert share.round == Round((4, 4), (3, 0), (4, 4))
    shard = BatchSamplerShard(BatchSampler(range(2), 4, drop_last=False), 3, 2, even_batches=False, uneven="weigh")
    assert list(shard) == [[0, 1]]
    assert next(shard.shares()).round == Round((2, 2, 2), (2, 0, 0), (2, 0, 0))


@pytest.mark.parametrize(("even", "split"), list(itertools.product([True, False], repeat=2)))
def test_short_batches_in_the_middle_lose_nothing(even, split):
    # Accelerate drops the samples of such rounds.
    class Thirds:
        batch_size = 4

        def __iter__(self):
            return iter([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]])

    ranks = [list(BatchSamplerShard(Thirds(), 2, rank, split, even, uneven="weigh").shares()) for rank in range(2)]
    check_rounds(ranks, list(range(10)), everything=True)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (
            BatchSamplerShard,
            ([[1, 2]],),
            "is not known: this list has no batch_size. Give a batch_size, or pass",
        ),
        (BatchSamplerShard, (BatchSampler(range(9), 3, False),), "batch_size=3 is not a round multiple of 2. Use .*=4"),
        (IterableDatasetShard, (SizedStream(4), 3), "batch_size=3 is not a round multiple of 2"),
        (IterableDatasetShard, (SizedStream(4), None), "size is not known: batch_size is None. Give a batch_size"),
    ],
)
def test_splitting_needs_a_size_that_divides(kind, arguments, words):
    with pytest.raises(ValueError, match=f"split_batches=True .* {words}"):
        kind(*arguments, num_processes=2, split_batches=True)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_rest_is_shared_out_among_any_number(num_processes):
    sampler = BatchSampler(range(23), 4, drop_last=False)
    for skip in (0, 3, 4, 5, 8, 11, 23, 40):
        ranks = [list(BatchSamplerShard(sampler, num_processes, rank).shares(skip)) for rank in range(num_processes)]
        real = [
            share.indices[: share.round.real[rank]]
            for shares in zip(*ranks, strict=True)
            for rank, share in enumerate(shares)
        ]
        assert list(itertools.chain(*real)) == list(range(skip, 23))


def test_stream_without_epochs_is_seeded_with_the_epoch():
    class Shuffled(IterableDataset[int]):
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.randperm(8, generator=self.generator).tolist())

    shard = IterableDatasetShard(Shuffled(), 2)
    first = list(shard)
    shard.set_epoch(1)
    second = list(shard)
    shard.set_epoch(0)
    assert list(shard) == first != second


def test_skipping_keeps_rounds_and_counts():
    shard = BatchSamplerShard(BatchSampler(range(22), 4, drop_last=False), 2, 1)
    rest = SkipBatchSampler(shard, 2)
    assert list(rest) == list(shard)[2:]
    assert len(rest) == len(shard) - 2
    assert rest.total_length == len(shard)
    assert list(rest.shares()) == list(shard.shares())[2:]
    # Where samples have been had, the first batches are among them.
    assert list(rest.shares(20)) == list(shard.shares(20))
    assert len(SkipBatchSampler(shard, 99)) == 0


@pytest.mark.parametrize(
    ("uneven", "parts", "last"),
    [
        ("weigh", [[0, 1, 4], [2, 3, 4]], Round((1, 1), (1, 0), (1, 0))),
        ("stop", [[0, 1], [2, 3]], Round((2, 2), (2, 2), (2, 2))),
        ("leave", [[0, 1, 4, 0], [2, 3, 1, 2]], Round((2, 2), (1, 0), (2, 2))),
    ],
)
def test_last_round_of_a_stream_follows_the_policy(uneven, parts, last):
    shards = [
        IterableDatasetShard(SizedStream(5), 2, num_processes=2, process_index=rank, even_batches=False, uneven=uneven)
        for rank in range(2)
    ]
    assert [list(shard) for shard in shards] == parts
    assert [len(shard.open()[0]) for shard in shards] == [4, 4]
    assert list(shards[1].open()[1])[-1].round == last


def test_streams_of_batches_deal_whole_ones():
    batches = [torch.zeros(3), torch.zeros(2), torch.zeros(4)]

    class Batches(IterableDataset[torch.Tensor]):
        def __iter__(self):
            return iter(batches)

    shard = IterableDatasetShard(Batches(), None, num_processes=2, process_index=1, even_batches=False, uneven="weigh")
    assert [share.round for share in shard.open()[1]] == [Round((3, 2), (3, 2), (3, 2)), Round((4, 4), (4, 0), (4, 0))]


def test_seedable_order_is_accelerates_and_depends_on_seed_and_epoch_alone():
    from accelerate.data_loader import SeedableRandomSampler as Theirs

    each: Any = ({}, {"num_samples": 13}, {"replacement": True, "num_samples": 40})
    for options in each:
        theirs, ours = (kind(range(10), data_seed=3, **options) for kind in (Theirs, SeedableRandomSampler))
        assert [list(ours) for _ in range(3)] == [list(theirs) for _ in range(3)]
    sampler = SeedableRandomSampler(range(10), data_seed=5)
    epochs = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    torch.rand(7)
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(SeedableRandomSampler(range(10), data_seed=2**64 - 1)) != epochs[0]
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state(), torch.get_rng_state()
    list(SeedableRandomSampler(range(10), generator=generator))
    assert torch.equal(before[0], generator.get_state())
    assert torch.equal(before[1], torch.get_rng_state())


@pytest.mark.parametrize("num_samples", [30, 100, 200, 230])
@pytest.mark.parametrize("seed", [None, 1])
def test_random_order_is_torchs_drawn_alike(num_samples, seed):
    def draw(read: Any) -> Any:
        torch.manual_seed(9)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        batches = BatchSampler(RandomSampler(range(100), False, num_samples, generator), 7, drop_last=False)
        drawn = [list(read(batches)) for _ in range(2)]
        return drawn, torch.get_rng_state().tolist(), None if generator is None else generator.get_state().tolist()

    assert draw(batches_of) == draw(iter)


@pytest.mark.parametrize("batch_size", [32, None])
def test_no_list_of_all_indices_is_made(batch_size):
    data: Any = range(10**6)
    loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size, shuffle=True))
    tracemalloc.start()
    try:
        batches = list(itertools.islice(loader, 200))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(batches) == 200
    assert peak < 4e6, "a list of 10^6 integers takes 36 MB"
