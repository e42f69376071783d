"""Going on in the middle of an epoch: the same samples in the same order, on any number of ranks."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler, get_worker_info

from notebook_launcher.training.data import (
    DataLoaderShard,
    SkipDataLoader,
    gather_for_metrics,
    prepare_data_loader,
    skip_first_batches,
)
from notebook_launcher.training.random import capture_rng_states, restore_rng_states
from tests.support.toy_training import sessions_fixture

LENGTH = 51


ranks = sessions_fixture(1, 2, 3)


class Stream(IterableDataset[int]):
    """Numbers shuffled by the epoch, or with Python's generator; workers have every n-th."""

    def __init__(self, *, by_epoch: bool = True) -> None:
        self.by_epoch = by_epoch
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        numbers = list(range(LENGTH))
        (random.Random(self.epoch) if self.by_epoch else random).shuffle(numbers)
        worker = get_worker_info()
        return iter(numbers if worker is None else numbers[worker.id :: worker.num_workers])


class NumPysOrder(BatchSampler):
    """A batch sampler of the user's, with a generator that nobody knows of."""

    batch_size, drop_last = 4, False

    def __init__(self) -> None: ...

    def __len__(self) -> int:
        return 13

    def __iter__(self):
        return iter(np.array_split(np.random.permutation(LENGTH), 13))  # noqa: NPY002 - what users do


LOADERS: dict[str, dict[str, Any]] = {
    "shuffled": {"loader": {"shuffle": True}},
    "own generator": {"loader": {"shuffle": True}},
    "seedable": {"loader": {"shuffle": True}, "options": {"use_seedable_sampler": True}},
    "workers": {"loader": {"shuffle": True, "num_workers": 2, "persistent_workers": True}},
    "weighted": {"sampler": "weighted"},
    "numpy": {"sampler": "numpy"},
    "split": {"loader": {"shuffle": True, "batch_size": 6}, "options": {"split_batches": True}},
    "uneven": {"loader": {"shuffle": True}, "options": {"even_batches": False}},
    "dispatched": {"loader": {"shuffle": True}, "options": {"dispatch_batches": True}},
    "stream": {"stream": True, "options": {"dispatch_batches": True}},
    "random stream": {"stream": False, "options": {"dispatch_batches": True}},
    "random, read by all": {"stream": False, "options": {"dispatch_batches": False}},
    "read by all": {"stream": True, "options": {"dispatch_batches": False}},
    "stream, workers": {
        "stream": True,
        "loader": {"num_workers": 3},
        "options": {"dispatch_batches": False},
    },
    "stream, lasting workers": {
        "stream": True,
        "loader": {"num_workers": 2, "persistent_workers": True},
        "options": {"dispatch_batches": False},
    },
    "dispatched, workers": {"stream": True, "loader": {"num_workers": 2}, "options": {"dispatch_batches": True}},
}
WEIGHED = {"even_batches": False, "uneven": "weigh"}
KEPT_IN_STEP: dict[str, dict[str, Any]] = {
    "weighed": {"loader": {"shuffle": True}, "options": WEIGHED},
    "split, weighed": {"loader": {"shuffle": True, "batch_size": 6}, "options": {"split_batches": True, **WEIGHED}},
    "numpy, weighed": {"sampler": "numpy", "options": WEIGHED},
}
"""Loaders in whose last round the second of two ranks gets a batch again."""
LASTING = {"num_workers": 2, "persistent_workers": True}
LASTING_WORKERS: dict[str, dict[str, Any]] = {
    "seedable, lasting workers": {
        "loader": {"shuffle": True, **LASTING},
        "options": {"use_seedable_sampler": True},
    },
    "own generator, lasting workers": {"loader": {"shuffle": True, **LASTING}},
    "dispatched, lasting workers": {
        "loader": {"shuffle": True, **LASTING},
        "options": {"use_seedable_sampler": True, "dispatch_batches": True},
    },
}


def make(kind: str, seed: int, batch_size: int = 4) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    what = {**LOADERS, **KEPT_IN_STEP, **LASTING_WORKERS}[kind]
    data: Any = Stream(by_epoch=what["stream"]) if "stream" in what else range(LENGTH)
    arguments = {"batch_size": batch_size, **what.get("loader", {})}
    if kind.startswith("own generator"):
        arguments["generator"] = torch.Generator().manual_seed(seed)
    if what.get("sampler") == "numpy":
        arguments = {"batch_sampler": NumPysOrder()}
    elif what.get("sampler") == "weighted":
        arguments["sampler"] = WeightedRandomSampler([1.0] * LENGTH, LENGTH)
    return prepare_data_loader(DataLoader(data, **arguments), **what.get("options", {}))


def go_on(
    kind: str,
    seed: int,
    state: dict[str, Any] | None,
    stop_at: int | None,
    stop_after: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Go through three epochs, or stop after a number of batches or epochs, and return the samples of each.

    `batches` are those of the rank, with the samples that complete a round.
    `state` is that of the loader and of the default generators; those are drawn from in every step.
    """
    loader = make(kind, seed, **options)
    if state is not None:
        loader.load_state_dict(state["loader"])
        restore_rng_states(state["generators"])
    epochs: list[list[int]] = []
    drawn, batches, step = [], [], 0
    while loader.iteration < 3:
        epochs.append([])
        for batch in loader:
            epochs[-1] += gather_for_metrics(batch, loader).tolist()
            batches.append(batch.tolist())
            drawn.append((torch.rand(()).item(), random.random()))
            step += 1
            if step == stop_at:
                return {"epochs": epochs, "batches": batches, "drawn": drawn, "state": states_now(loader)}
        if loader.iteration == stop_after:
            return {"epochs": epochs, "batches": batches, "drawn": drawn, "state": states_now(loader)}
    return {"epochs": epochs, "batches": batches, "drawn": drawn}


def states_now(loader: Any) -> dict[str, Any]:
    return {"loader": loader.state_dict(), "generators": capture_rng_states()}


def join(first: dict[str, Any], rest: dict[str, Any]) -> list[list[int]]:
    *before, broken = first["epochs"]
    mended, *after = rest["epochs"]
    return [*before, broken + mended, *after]


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_resumed_run_is_bit_for_bit_equal(ranks, num_processes, kind):
    through = ranks.run(num_processes, go_on, kind, 1, None, None)
    for stop_at in (3, 9):
        first = ranks.run(num_processes, go_on, kind, 1, None, stop_at)
        rest = ranks.run(num_processes, lambda state: go_on(kind, 2, state, None), first[0]["state"])
        for rank in range(num_processes):
            assert join(first[rank], rest[rank]) == through[rank]["epochs"], stop_at
            assert first[rank]["batches"] + rest[rank]["batches"] == through[rank]["batches"], stop_at
        assert first[0]["drawn"] + rest[0]["drawn"] == through[0]["drawn"]


@pytest.mark.parametrize("kind", [*LOADERS, *LASTING_WORKERS])
def test_run_resumed_between_epochs_is_bit_for_bit_equal(ranks, kind):
    through = ranks.run(2, go_on, kind, 1, None, None)
    for epochs in (1, 2):
        first = ranks.run(2, go_on, kind, 1, None, None, epochs)
        rest = ranks.run(2, lambda state: go_on(kind, 2, state, None), first[0]["state"])
        for rank in range(2):
            for what in ("epochs", "batches"):
                assert first[rank][what] + rest[rank][what] == through[rank][what], epochs
        assert first[0]["drawn"] + rest[0]["drawn"] == through[0]["drawn"]
        if kind == "dispatched, lasting workers":  # Its ranks draw alike, so that the states of rank 0 will do for all.
            assert first[1]["drawn"] + rest[1]["drawn"] == through[1]["drawn"] == through[0]["drawn"]
            assert all(one["state"]["loader"]["has_seeded_workers"] for one in first)


@pytest.mark.parametrize("kind", KEPT_IN_STEP)
def test_batch_that_keeps_a_rank_in_step_is_the_same_in_a_resumed_run(ranks, kind):
    through = ranks.run(2, go_on, kind, 1, None, None)
    before_last = len(through[1]["batches"]) // 3 - 1
    first = ranks.run(2, go_on, kind, 1, None, before_last)
    rest = ranks.run(2, lambda state: go_on(kind, 2, state, None), first[0]["state"])
    assert first[1]["batches"] + rest[1]["batches"] == through[1]["batches"]
    assert rest[1]["batches"][0] == first[1]["batches"][-1]


@pytest.mark.parametrize("kind", sorted(set(LOADERS) - {"stream, workers", "stream, lasting workers", "split"}))
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_another_number_of_ranks_resumes_in_the_same_order(ranks, kind, before, after):
    through = ranks.run(before, go_on, kind, 1, None, None)[0]["epochs"]
    first = ranks.run(before, go_on, kind, 1, None, 4)[0]
    rest = ranks.run(after, go_on, kind, 2, first["state"], None)
    assert all(loop["epochs"] == rest[0]["epochs"] for loop in rest)
    joined = join(first, rest[0])
    stopped_in = len(first["epochs"])
    assert joined[:stopped_in] == through[:stopped_in]
    if kind != "weighted":
        assert [sorted(epoch) for epoch in joined] == [list(range(LENGTH))] * 3


@pytest.mark.parametrize("kind", ["stream, workers", "stream, lasting workers"])
def test_streams_of_workers_resume_with_every_sample_once(ranks, kind):
    first = ranks.run(2, go_on, kind, 1, None, 4)[0]
    for after in (1, 3):
        rest = ranks.run(after, go_on, kind, 2, first["state"], None)[0]
        assert [sorted(epoch) for epoch in join(first, rest)] == [list(range(LENGTH))] * 3


def test_another_batch_size_resumes_with_every_sample_once(ranks):
    first = ranks.run(2, go_on, "seedable", 1, None, 3)[0]
    through = ranks.run(1, go_on, "seedable", 1, None, None)[0]["epochs"]
    rest = ranks.run(1, lambda state: go_on("seedable", 2, state, None, batch_size=10), first["state"])[0]
    assert join(first, rest) == through


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "numpy", "seedable", "dispatched", "split"])
def test_rest_of_an_epoch_is_completed_from_its_start(ranks, kind):
    def read(skip: int) -> tuple[list[list[int]], float]:
        loader = make(kind, 1)
        rest = skip_first_batches(loader, skip) if skip else loader
        read = [batch.tolist() for batch in rest]
        return read + [batch.tolist() for batch in loader], torch.rand(()).item()

    whole, parts = ranks.run(2, read, 0), ranks.run(2, read, 3)
    for rank in range(2):
        assert parts[rank] == (whole[rank][0][3:], whole[rank][1])


def simple(length: int = 10, **options: Any) -> Any:
    data: Any = range(length)
    return prepare_data_loader(DataLoader(data, batch_size=2), **options)


def test_loader_resumes_where_a_loop_was_left():
    loader = simple()
    for batch in loader:
        if batch[0] == 4:
            break
    other = simple()
    other.load_state_dict(loader.state_dict())
    assert other.state_dict()["samples"] == 6
    assert [batch.tolist() for batch in other] == [[6, 7], [8, 9]]
    # Here, the next loop begins anew.
    assert [batch.tolist() for batch in loader][0] == [0, 1]  # noqa: RUF015


def test_another_epoch_forgets_the_position():
    loader = simple()
    next(iter(loader))
    state = loader.state_dict()
    for epoch, length in ((0, 4), (3, 5)):
        other = simple()
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert len(list(other)) == length


def test_position_can_be_saved_safely():
    loader = make("shuffled", 1)
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    other = make("shuffled", 2)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert len(list(other)) == len(loader) - 1


def test_resumed_loader_loads_no_consumed_sample():
    loaded = []

    class Data:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

    data: Any = Data()
    loader = prepare_data_loader(DataLoader(data, batch_size=2))
    loader.load_state_dict({**loader.state_dict(), "samples": 6})
    list(loader)
    assert loaded == [6, 7, 8, 9]


def test_skipping_by_hand_after_loading_skips_once():
    loader = make("shuffled", 1)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 3:
            state = loader.state_dict()
    other = make("shuffled", 2)
    other.load_state_dict(state)
    rest = skip_first_batches(other, 3)
    assert [batch.tolist() for batch in rest] == batches[3:]
    assert len(list(other)) == len(batches)


def states_of(loader: Any, epochs: int) -> tuple[list[list[list[int]]], list[Any]]:
    """Return the batches of some epochs, and the states of the loader and of the generators at each batch."""
    seen: list[list[list[int]]] = []
    states: list[Any] = []
    for _ in range(epochs):
        seen.append([])
        for batch in loader:
            seen[-1].append(batch.tolist())
            states.append((loader.state_dict(), capture_rng_states()))
    return seen, states


def load(loader: Any, states: tuple[Any, Any]) -> None:
    loader.load_state_dict(states[0])
    restore_rng_states(states[1])


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "seedable", "stream", "dispatched"])
def test_skipping_none_after_the_last_batch_begins_the_next_epoch(kind):
    loader = make(kind, 1)
    epochs, states = states_of(loader, 3)
    other = make(kind, 2)
    load(other, states[len(epochs[0]) - 1])
    assert [batch.tolist() for batch in skip_first_batches(other, 0)] == epochs[1]
    assert [batch.tolist() for batch in other] == epochs[2]


@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
def test_skipping_none_in_the_middle_begins_the_same_epoch_again(kind):
    epochs, states = states_of(make(kind, 1), 2)
    other = make(kind, 2)
    load(other, states[2])
    assert [[batch.tolist() for batch in skip_first_batches(other, 0)], [batch.tolist() for batch in other]] == epochs


@pytest.mark.parametrize("kind", ["shuffled", "own generator"])
def test_epoch_that_is_chosen_after_loading_has_the_order_of_the_run_that_saved(kind):
    epochs, states = states_of(make(kind, 1), 2)
    other = make(kind, 2)
    load(other, states[len(epochs[0]) - 1])
    other.set_epoch(1)
    state = other.state_dict()
    assert [batch.tolist() for batch in other] == epochs[1]
    assert state["epoch"] == 1


def test_state_without_the_newer_fields_is_loaded():
    loader = make("shuffled", 1)
    state, _ = states_of(loader, 1)[1][2]
    rest = [make("shuffled", 2), make("shuffled", 2)]
    rest[0].load_state_dict(state)
    for name in ("is_complete", "was_evaluation", "later", "has_seeded_workers"):
        del state[name]
    rest[1].load_state_dict(state)
    assert [batch.tolist() for batch in rest[1]] == [batch.tolist() for batch in rest[0]]


def test_positions_in_the_rest_of_an_epoch_are_the_loaders():
    loader = simple()
    for _ in skip_first_batches(loader, 2):
        break
    other = simple()
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [[6, 7], [8, 9]]


@pytest.mark.parametrize("kind", [DataLoaderShard, SkipDataLoader])
def test_loader_that_always_skips_resumes(kind):
    loaders = [kind(range(10), batch_size=2, skip_batches=2) for _ in range(2)]
    next(iter(loaders[0]))
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert [batch.tolist() for batch in loaders[1]] == [[6, 7], [8, 9]]
    assert [batch.tolist() for batch in loaders[1]] == [[4, 5], [6, 7], [8, 9]]


def test_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"a state without 'epoch'\. .* and this has \['_num_yielded'\]"):
        simple().load_state_dict({"_num_yielded": 3})
