"""Streamed data sets of Hugging Face `datasets`: every rank reads its own shards, and all ranks stay in step."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import get_rank, get_world_size
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher import Accelerator
from notebook_launcher.training.data.metrics import gather_for_metrics
from notebook_launcher.training.data.prepare import prepare_data_loader, skip_first_batches
from tests.support.toy_training import full_gradient, make_data, make_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


EQUAL, UNEVEN, ONE_EMPTY = (4, 4, 4, 4), (1, 5, 0, 7), (5, 4, 0, 0)


def read_shards(shards: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
    for shard, size in shards:
        for row in range(size):
            yield {"number": 10 * shard + row, "pid": os.getpid()}


def streamed(sizes: tuple[int, ...]) -> Any:
    """Return a streamed data set of shards of these sizes; row r of shard s is number 10 * s + r."""
    import datasets

    return datasets.IterableDataset.from_generator(read_shards, gen_kwargs={"shards": list(enumerate(sizes))})


def numbers_in(sizes: tuple[int, ...]) -> list[int]:
    return [10 * shard + row for shard, size in enumerate(sizes) for row in range(size)]


def prepare(data: Any, *, even: bool = False, uneven: str = "weigh", **loading: Any) -> Any:
    return prepare_data_loader(DataLoader(data, **loading), dispatch_batches=False, even_batches=even, uneven=uneven)


def go_through(sizes: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Iterate two epochs; return what was seen of the second, on this rank and by all."""
    loader = prepare(streamed(sizes), batch_size=2, **options)
    list(loader)
    told: dict[str, Any] = {"mine": [], "all": [], "rounds": [], "ends": []}
    for batch in loader:
        told["mine"].append(batch["number"].tolist())
        told["all"] += gather_for_metrics(batch["number"], loader).tolist()
        told["rounds"].append(loader.current_round)
        told["ends"].append(loader.end_of_dataloader)
    return told


@pytest.mark.parametrize(
    ("sizes", "even", "uneven", "num_workers"),
    [
        (EQUAL, True, "weigh", 2),
        (UNEVEN, False, "weigh", 2),
        (UNEVEN, False, "stop", 0),
        (ONE_EMPTY, False, "weigh", 0),
        (ONE_EMPTY, True, "weigh", 0),
    ],
)
def test_every_rank_reads_its_own_shards_and_every_sample_counts_once(ranks, sizes, even, uneven, num_workers):
    options = {"even": even, "uneven": uneven, "num_workers": num_workers}
    first, second = ranks.run(2, go_through, sizes, options)
    assert first["rounds"] == second["rounds"]
    assert first["ends"] == second["ends"] == [False] * (len(first["rounds"]) - 1) + [True] * bool(first["rounds"])
    for rank, told in enumerate((first, second)):
        for batch, drawn in zip(told["mine"], told["rounds"], strict=True):
            assert len(batch) == drawn.rows[rank]
            assert drawn.weights[rank] == (len(batch) if even else drawn.real[rank])
            if drawn.real[rank]:
                assert {number // 10 // 2 for number in batch} == {rank}  # of four shards, the first two are rank 0's
    assert first["all"] == second["all"]
    if uneven == "stop":
        assert sorted(set(first["all"])) == sorted(first["all"])
        assert all(min(drawn.real) > 0 for drawn in first["rounds"])
    else:
        assert sorted(first["all"]) == numbers_in(sizes)


def train(sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train one window over everything; return the gradient's effect on the weights, and the weights before."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=100, even_batches=False, dispatch_batches=False)
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs, targets = make_data(40)
    loader = DataLoader(streamed(sizes), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs[batch["number"]]), targets[batch["number"]]))
            optimizer.step()
            optimizer.zero_grad()
    after = accelerator.unwrap_model(model).state_dict()
    return [before[name] - after[name] for name in before], before


def test_gradient_is_that_of_the_mean_over_all_shards(ranks):
    inputs, targets = make_data(40)
    rows = numbers_in(UNEVEN)
    for gradient, before in ranks.run(2, train, UNEVEN):
        wanted = full_gradient(before, inputs[rows], targets[rows])
        for one, other in zip(gradient, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_workers", "left_after"), [(0, 3), (2, 1)])
def test_loader_resumes_in_every_ranks_shards(ranks, num_workers, left_after):
    def resume() -> Any:
        loader = prepare(streamed(UNEVEN), batch_size=2, num_workers=num_workers)
        whole = [batch["number"].tolist() for batch in loader]
        loader.set_epoch(0)
        for number, _ in enumerate(loader, 1):
            if number == left_after:
                break
        state = loader.state_dict()
        again = prepare(streamed(UNEVEN), batch_size=2, num_workers=num_workers)
        again.load_state_dict(state)
        seen = [(batch["number"].tolist(), again.current_round.real) for batch in again]
        skipping: Any = skip_first_batches(prepare(streamed(UNEVEN), batch_size=2, num_workers=num_workers), left_after)
        skipped = [(batch["number"].tolist(), skipping.current_round.real) for batch in skipping]
        return whole[left_after:], seen, skipped

    for rank, (whole, seen, skipped) in enumerate(ranks.run(2, resume)):

        def real(rows: Any, rank: int = rank) -> Any:
            return [(batch if counts[rank] else None, counts) for batch, counts in rows]

        assert real(seen) == real(skipped)
        assert len(seen) == len(whole)
        assert all(batch == other for batch, (other, counts) in zip(whole, seen, strict=True) if counts[rank])


def test_position_of_other_ranks_or_workers_is_refused(ranks):
    def save() -> Any:
        loader = prepare(streamed(EQUAL), batch_size=2)
        next(iter(loader))
        return loader.state_dict()

    def load(state: Any, num_workers: int) -> str:
        loader = prepare(streamed(EQUAL), batch_size=2, num_workers=num_workers)
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="saved where data were read by other ranks or workers") as caught:
            next(iter(loader))
        return str(caught.value)

    state = ranks.run(2, save)[0]
    assert "2 ranks read shards with 2 streams each" in ranks.run(2, load, state, 2)[0]
    assert "every rank, or rank 0 alone, reads the data set as a whole" in ranks.run(1, load, state, 0)[0]


def split_for(rank: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(streamed(EQUAL), rank=rank, world_size=2)


def test_data_set_that_the_user_split_is_not_split_again(ranks):
    def read(rank: int | None) -> Any:
        data = split_for(dist.get_rank() if rank is None else rank)
        loader = Accelerator(cpu=True).prepare(DataLoader(data, batch_size=2))
        return [number for batch in loader for number in batch["number"].tolist()]

    assert sorted(number for seen in ranks.run(2, read, None) for number in seen) == numbers_in(EQUAL)
    with pytest.raises(ValueError, match="was split for rank 0 of 2, and this is rank 1 of 2"):
        ranks.run(2, read, 0)


@pytest.mark.parametrize(("sizes", "kind"), [((3, 3), "OwnShards"), ((7,), "IterableDatasetShard")])
def test_data_set_with_fewer_shards_than_ranks_is_read_by_all(ranks, sizes, kind):
    def read() -> Any:
        loader = prepare(streamed(sizes), batch_size=2)
        return type(loader.dataset).__name__, [n for batch in loader for n in batch["number"].tolist()]

    kinds, seen = zip(*ranks.run(2, read), strict=True)
    assert set(kinds) == {kind}
    assert set(itertools.chain(*seen)) == set(numbers_in(sizes))


def test_compat_reads_the_shards_that_accelerate_reads(ranks):
    def read() -> Any:
        from notebook_launcher.compat import Accelerator, AcceleratorState, DataLoaderConfiguration

        config = DataLoaderConfiguration(dispatch_batches=False)
        loader: Any = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(streamed(EQUAL), 2))
        seen = [n for batch in loader for n in batch["number"].tolist()]
        AcceleratorState._reset_state(True)
        return seen

    assert ranks.run(2, read) == [numbers_in((4, 4)), [20, 21, 22, 23, 30, 31, 32, 33]]


def ask_accelerate() -> tuple[int, int]:
    from accelerate import PartialState

    return PartialState().process_index, PartialState().num_processes


ASKS: dict[str, Callable[[], tuple[int, int]]] = {
    "environment": lambda: (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])),
    "local": lambda: (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])),
    "accelerate": ask_accelerate,
    "methods": lambda: (0, 1) if dist.group.WORLD is None else (dist.group.WORLD.rank(), dist.group.WORLD.size()),
    "imported": lambda: (get_rank(), get_world_size()) if dist.is_initialized() else (0, 1),
    "group": lambda: (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1),
}


class SplitWhenRead(IterableDataset[Any]):
    """Takes every second of 11 numbers, if whatever it asks says that there are two ranks."""

    def __init__(self, asks: str) -> None:
        self.asks = asks

    def __iter__(self) -> Iterator[int]:
        rank, size = ASKS[self.asks]()
        return iter(range(rank, 11, size))


class SplitWhenMade(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 11, self.world_size))


def seen_of(data: Any, **options: Any) -> list[int]:
    loading = {"batch_size": 2, "num_workers": options.pop("num_workers", 0)}
    loader = prepare_data_loader(DataLoader(data, **loading), even_batches=False, put_on_device=True, **options)
    return sorted(int(number) for batch in loader for number in gather_for_metrics(batch, loader))


def test_data_set_that_splits_itself_is_read_as_a_whole(ranks):
    def read() -> Any:
        seen = [
            seen_of(SplitWhenRead(asks), dispatch_batches=None if num_workers else False, num_workers=num_workers)
            for asks in ASKS
            for num_workers in (0, 1)
        ]
        return [*seen, seen_of(SplitWhenMade(), dispatch_batches=None)], os.environ["RANK"], dist.get_rank()

    assert ranks.run(2, read) == [([list(range(11))] * 13, str(rank), rank) for rank in range(2)]


@pytest.mark.parametrize("option", ["dispatch_batches", "split_batches"])
def test_share_of_one_rank_is_not_shared_out_again(ranks, option):
    def refuse() -> None:
        for data in (split_for(dist.get_rank()), SplitWhenMade()):
            options: Any = {option: True, "put_on_device": True}
            with pytest.raises(ValueError, match=f"made for one rank, and with {option}=True that rank's share"):
                prepare_data_loader(DataLoader(data, batch_size=2), **options)
            with pytest.warns(UserWarning, match="samples of other shares are never read"):
                prepare_data_loader(DataLoader(data, batch_size=2), keeps_shares=True, **options)

    ranks.run(2, refuse)
