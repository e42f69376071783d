"""Prepared loaders on several ranks: every sample once, in order, and all ranks in step."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from notebook_launcher import Accelerator, DataLoaderConfiguration
from notebook_launcher.training import operations
from notebook_launcher.training.data.metrics import gather_for_metrics
from notebook_launcher.training.data.prepare import prepare_data_loader, skip_first_batches
from tests.support.toy_loaders import SizedStream, Stream
from tests.support.toy_training import recorded

if TYPE_CHECKING:
    from tests.support.toy_training import Sessions

SIZES = (0, 1, 3, 8, 9, 13)
POLICIES = [(True, "weigh"), (False, "weigh"), (False, "stop")]
CPU = torch.device("cpu")


def prepare(data: Any, options: dict[str, Any], **kwargs: Any) -> Any:
    return prepare_data_loader(DataLoader(data, **kwargs), CPU, put_on_device=True, **options)


def go_through(options: dict[str, Any], kind: str) -> list[Any]:
    """Iterate loaders of all sizes; return for each what was not as it should be, and the rank's samples that count."""
    found = []
    stream, split = "stream" in kind, "split" in kind
    world = dist.get_world_size()
    for size in SIZES:
        for batch_size in (world, 2 * world) if split else (1, 3):
            for drop_last in (False, True):
                data: Any = Stream(size) if stream else range(size)
                loader = prepare(data, {**options, "split_batches": split}, batch_size=batch_size, drop_last=drop_last)
                seen, ends = [], []
                for batch in loader:
                    rows = loader.current_round.rows
                    seen.append(batch[: loader.current_round.real[dist.get_rank()]].tolist())
                    ends.append((len(batch) == rows[dist.get_rank()], loader.end_of_dataloader))
                fine = ends == [(True, False)] * (len(ends) - 1) + [(True, True)] * (len(ends) > 0)
                fine = fine and (stream or len(loader) == len(ends))
                found.append((size, drop_last, fine or (batch_size, ends), seen))
    return found


@pytest.mark.parametrize("kind", ["map", "split map", "stream", "split stream"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_every_sample_comes_once_and_in_order(ranks, dispatch, kind):
    policies = [{"dispatch_batches": dispatch, "even_batches": even, "uneven": uneven} for even, uneven in POLICIES]
    by_rank = ranks.run(3, lambda: [go_through(options, kind) for options in policies])
    for options, *found in zip(policies, *by_rank, strict=True):
        for parts in zip(*found, strict=True):
            size, drop_last, *_ = parts[0]
            assert [fine for _, _, fine, _ in parts] == [True] * 3, options
            rounds = itertools.chain(*zip(*(seen for *_, seen in parts), strict=True))
            seen = list(itertools.chain(*rounds))
            assert seen == list(range(len(seen) if drop_last or options["uneven"] == "stop" else size)), options


def collect(sessions: Sessions, num_processes: int, options: Any, *, stream: bool = False, **kwargs: Any) -> Any:
    """Return the samples of two epochs, round by round, without repetitions, as all ranks gather them."""

    def gather() -> list[list[list[int]]]:
        torch.manual_seed(3)
        data: Any = Stream(23, "by epoch") if stream else range(23)
        loader = prepare(data, options, **kwargs)
        return [[gather_for_metrics(batch, loader).tolist() for batch in loader] for _ in range(2)]

    everybody = sessions.run(num_processes, gather)
    assert all(epochs == everybody[0] for epochs in everybody)
    return everybody[0]


def flat(epochs: list[list[list[int]]]) -> list[list[int]]:
    return [list(itertools.chain(*rounds)) for rounds in epochs]


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"dispatch_batches": True}])
def test_seedable_order_is_the_same_on_any_number_of_ranks(ranks, options):
    options = {**options, "use_seedable_sampler": True}
    alone = flat(collect(ranks, 1, options, batch_size=6, shuffle=True))
    assert alone[0] != alone[1]
    number = 3 if "split_batches" in options else 2
    assert flat(collect(ranks, number, options, batch_size=6, shuffle=True)) == alone


@pytest.mark.parametrize("kwargs", [{"shuffle": True}, {"weighted": True}])
def test_ranks_with_other_seeds_take_their_order_from_rank_0(ranks, kwargs):
    def shuffled() -> list[int]:
        torch.manual_seed(dist.get_rank())
        data: Any = range(23)
        sampler = WeightedRandomSampler([1.0] * 23, 23, replacement=False) if "weighted" in kwargs else None
        seen = []
        for seedable in (False, True):
            plain = DataLoader(data, batch_size=2, shuffle="shuffle" in kwargs, sampler=sampler)
            loader = prepare_data_loader(plain, use_seedable_sampler=seedable)
            seen += [gather_for_metrics(batch, loader).tolist() for _ in range(2) for batch in loader]
        return sorted(sample for batch in seen for sample in batch)

    assert ranks.run(2, shuffled) == [sorted([*range(23)] * 4)] * 2


@pytest.mark.parametrize(
    ("options", "kwargs"),
    [
        ({"split_batches": True}, {"persistent_workers": True, "prefetch_factor": 4}),
        ({"dispatch_batches": True, "use_seedable_sampler": True}, {}),
    ],
)
def test_workers_change_no_batch(ranks, options, kwargs):
    arguments: Any = {"batch_size": 4, "shuffle": True}
    expected = collect(ranks, 2, options, **arguments)
    assert collect(ranks, 2, options, num_workers=2, **arguments, **kwargs) == expected


@pytest.mark.parametrize(
    ("kwargs", "dispatch", "even"),
    [({}, False, True), ({}, True, False), ({"persistent_workers": True}, False, False)],
)
def test_workers_read_their_parts_of_a_stream(ranks, kwargs, dispatch, even):
    options = {"dispatch_batches": dispatch, "even_batches": even}
    epochs = flat(collect(ranks, 2, options, stream=True, batch_size=2, num_workers=2, **kwargs))
    assert [sorted(epoch) for epoch in epochs] == [[*range(23)]] * 2
    # Epochs reach the workers, where they are kept.
    assert epochs[0] != epochs[1]


def test_workers_are_prepared_as_torch_documents(ranks):
    def init(worker_id: int) -> None:
        get_worker_info().dataset.length = 4 + worker_id  # type: ignore[union-attr]

    def samples() -> list[int]:
        loader = prepare(Stream(0), {"dispatch_batches": False}, batch_size=1, num_workers=2, worker_init_fn=init)
        return sorted(sample for batch in loader for sample in gather_for_metrics(batch, loader).tolist())

    assert ranks.run(2, samples) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("data", "dispatch", "split", "seen", "message"),
    [
        (range(9), False, False, 0, r"rank 0 3, rank 1 2\), "),
        (range(9), False, True, 0, r"rank 0 5, rank 1 4\), "),
        (range(9), True, False, 0, r"5 batches, 2 for each round\), "),
        (range(9), True, True, 0, r"5 batches, 1 for each round\), "),
        (SizedStream(9), False, False, 0, r"1 of 4 samples are left for the last round\), "),
        (SizedStream(9), True, False, 0, r"5 batches, 2 for each round\), "),
        (Stream(9), False, False, 2, ""),
        (Stream(9), True, False, 2, ""),
    ],
)
def test_uneven_batches_may_be_an_error_before_the_loop_if_the_length_is_known(
    ranks, data, dispatch, split, seen, message
):
    def fail() -> int:
        options = {"even_batches": False, "uneven": "error", "dispatch_batches": dispatch, "split_batches": split}
        seen = 0
        with pytest.raises(ValueError, match=f'{message}.*uneven="error"'):
            for _ in prepare(data, options, batch_size=2):
                seen += 1
        return seen

    assert ranks.run(2, fail) == [seen] * 2


def test_ranks_that_would_read_different_data_raise_before_the_loop(ranks):
    """Other rows of a split, as when it is drawn after `prepare`: each would train on held-back rows."""

    def differ() -> int:
        rank = dist.get_rank()
        own = torch.randperm(20, generator=torch.Generator().manual_seed(rank))
        data: Any = range(20)
        at_epoch, at_sample = (prepare(data, {}, batch_size=2) for _ in range(2))
        at_epoch.set_epoch(2 * rank)
        at_sample.load_state_dict({**at_sample.state_dict(), "samples": 8 * rank})
        subsets: Any = (Subset(data, own[:16].tolist()), Subset(Subset(data, own), range(16)))  # type: ignore[arg-type]
        drawn: Any = SubsetRandomSampler(own[:16])  # type: ignore[arg-type]
        loaders = [
            ("rank 1's data set has 18 samples, rank 0's 20", prepare(data[: 20 - 2 * rank], {}, batch_size=2)),
            ("rank 1's loader has 7 batches, rank 0's 10", prepare(data, {}, batch_size=2 + rank)),
            ("rank 1 begins epoch 2, rank 0 epoch 0", at_epoch),
            ("rank 1 skips its first 0 batches, rank 0 1", skip_first_batches(prepare(data, {}), 1 - rank)),
            ("rank 1 begins at sample 8 of the epoch, rank 0 at 0", at_sample),
            *[("rank 1's subset of the data has other rows than rank 0's", prepare(each, {})) for each in subsets],
            ("Split the data before it", prepare(data, {}, batch_size=2, sampler=drawn)),
        ]
        for message, loader in loaders:
            with pytest.raises(RuntimeError, match=message):
                list(loader)
        return sum(len(batch) for batch in prepare(Subset(data, range(16)), {}, batch_size=2))

    assert ranks.run(2, differ) == [8] * 2


def test_generators_are_synchronised_on_request(ranks):
    def draw(rng_types: list[str] | None) -> float:
        torch.manual_seed(dist.get_rank())
        data: Any = range(4)
        list(prepare_data_loader(DataLoader(data), rng_types=rng_types))
        return torch.rand(()).item()

    synchronised = ranks.run(2, draw, ["torch", "generator"])
    assert synchronised[0] == synchronised[1]
    left = ranks.run(2, draw, None)
    assert left[0] != left[1]


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=["read by all", "dispatched"])
def test_loop_that_counts_a_repeated_batch_gets_a_warning(ranks: Sessions, options: dict[str, Any]) -> None:
    def loop(way: str, **changed: Any) -> list[str]:
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(**{"even_batches": False, **options, **changed})
        )
        weight = accelerator.prepare(torch.nn.Parameter(torch.ones(1)))
        data: Any = torch.arange(13.0)
        loader = accelerator.prepare(DataLoader(data, batch_size=3))
        use: Any = {"gather": accelerator.gather_for_metrics, "sum": torch.sum}.get(
            way, lambda batch: accelerator.backward((weight * batch).mean())
        )
        _, texts = recorded(lambda: [use(batch) for batch in loader])
        return [text for text in texts if "counts" in text]

    silent: Any = ("gather", {}), ("backward", {}), ("sum", {"even_batches": True}), ("sum", {"uneven": "stop"})
    none, ((told,), *others) = ranks.run(2, lambda: [loop("sum"), *(loop(way, **changed) for way, changed in silent)])
    assert none == [[], *others] == [[]] * 5
    assert f"counts {'1 sample' if options else '3 samples'} twice. Add up what gather_for_metrics() returns" in told


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=["read by all", "dispatched"])
def test_distributed_sampler_is_replaced_by_the_order_of_all_samples(
    ranks: Sessions, options: dict[str, Any], shuffle: Any
) -> None:
    def rounds() -> list[list[list[int]]]:
        data: Any = range(24)
        sampler: Any = DistributedSampler(data, shuffle=shuffle, seed=5)
        loader = DataLoader(data, batch_size=3, sampler=sampler)
        mine, theirs = [], []
        prepared = prepare_data_loader(loader, CPU, put_on_device=True, **options)
        for epoch in range(2):
            mine += [sorted(gather_for_metrics(batch, prepared).tolist()) for batch in prepared]
            sampler.set_epoch(epoch)
            theirs += [sorted(operations.gather(batch).tolist()) for batch in loader]
        return [mine, theirs]

    for mine, theirs in ranks.run(2, rounds):
        assert mine == theirs
        assert sorted(itertools.chain(*mine[:4])) == list(range(24))


def test_distributed_sampler_for_other_ranks_is_refused(ranks: Sessions) -> None:
    def loader() -> int:
        data: Any = range(24)
        sampler: Any = DistributedSampler(data, num_replicas=4, rank=0)
        loader = DataLoader(data, batch_size=3, sampler=sampler)
        with pytest.raises(ValueError, match="whose DistributedSampler is for 4 ranks, and the data are for 2"):
            prepare_data_loader(loader)
        with pytest.warns(UserWarning, match="only 1 of 4 samples is read"):
            return len(prepare_data_loader(loader, keeps_shares=True))

    assert ranks.run(2, loader) == [1, 1]


def test_repeated_batch_moves_no_row_of_a_sparse_embedding(ranks: Sessions) -> None:
    def train() -> list[float]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        embedding = torch.nn.Embedding(10, 2, sparse=True, _weight=torch.ones(10, 2))
        optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
        data: Any = torch.arange(3)
        embedding, optimizer, loader = accelerator.prepare(embedding, optimizer, DataLoader(data, batch_size=1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of the first sparse tensor of a process, unless told not to.
            for rows in loader:
                accelerator.backward(embedding(rows).square().sum(1).mean())
                optimizer.step()
                optimizer.zero_grad()
        weights: list[float] = accelerator.unwrap_model(embedding).weight[:4, 0].tolist()
        return weights

    alone = pytest.approx([0.9, 0.9, 0.9256, 1.0], abs=1e-4)
    assert ranks.run(2, train) == [alone, alone]
