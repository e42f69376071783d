"""Going on in the middle of an epoch: the same samples in the same order, on any number of ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, WeightedRandomSampler

from notebook_launcher.training.data.metrics import gather_for_metrics
from notebook_launcher.training.data.prepare import SkipDataLoader, prepare_data_loader, skip_first_batches
from notebook_launcher.training.data.shard import DataLoaderShard
from notebook_launcher.training.random import capture_rng_states, restore_rng_states
from tests.support.toy_loaders import Stream
from tests.support.toy_training import sessions_fixture

LENGTH = 27


ranks = sessions_fixture(1, 2, 3)  # In this process, torch's workers would leave a signal handler behind.


class NumPysOrder(BatchSampler):
    """A batch sampler of the user's, with a generator that nobody knows of."""

    batch_size, drop_last = 4, False

    def __init__(self) -> None: ...

    def __len__(self) -> int:
        return 7

    def __iter__(self):
        return iter(np.array_split(np.random.permutation(LENGTH), 7))  # noqa: NPY002 - what users do


LASTING = {"num_workers": 2, "persistent_workers": True}
WEIGHED = {"even_batches": False, "uneven": "weigh"}
"""In the last round the second of two ranks gets a batch again."""
DISPATCHED: dict[str, Any] = {"dispatch_batches": True}
SEEDABLE: dict[str, Any] = {"use_seedable_sampler": True}
READ_BY_ALL: dict[str, Any] = {"dispatch_batches": False}
LOADERS: dict[str, dict[str, Any]] = {
    "shuffled": {"loader": {"shuffle": True}},
    "own generator, lasting workers": {"loader": {"shuffle": True, **LASTING}},
    "seedable": {"loader": {"shuffle": True}, "options": SEEDABLE},
    "lasting workers": {"loader": {"shuffle": True, **LASTING}},
    "weighted": {"sampler": "weighted"},
    "numpy": {"sampler": "numpy", "options": WEIGHED},
    "weighed": {"loader": {"shuffle": True}, "options": WEIGHED},
    "split": {"loader": {"shuffle": True, "batch_size": 6}, "options": {"split_batches": True, **WEIGHED}},
    "dispatched": {"loader": {"shuffle": True}, "options": DISPATCHED},
    "dispatched, lasting workers": {"loader": {"shuffle": True, **LASTING}, "options": SEEDABLE | DISPATCHED},
    "stream": {"stream": "by epoch", "options": DISPATCHED},
    "random stream": {"stream": "drawn", "options": DISPATCHED},
    "random, read by all": {"stream": "drawn", "options": READ_BY_ALL},
    "stream, workers": {"stream": "by epoch", "loader": {"num_workers": 3}, "options": READ_BY_ALL},
    "stream, lasting workers": {"stream": "by epoch", "loader": LASTING, "options": READ_BY_ALL},
    "dispatched stream, workers": {"stream": "by epoch", "loader": {"num_workers": 2}, "options": DISPATCHED},
}
ORDER_OF_RANKS = {"stream, workers", "stream, lasting workers", "split"}
"""Loaders whose order depends on the number of ranks."""


def make(kind: str, seed: int, batch_size: int = 4) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    what = LOADERS.get(kind) or {"loader": {"shuffle": True}}
    data: Any = Stream(LENGTH, what["stream"]) if "stream" in what else range(LENGTH)
    arguments = {"batch_size": batch_size, **what.get("loader", {})}
    if kind.startswith("own generator"):
        arguments["generator"] = torch.Generator().manual_seed(seed)
    if what.get("sampler") == "numpy":
        arguments = {"batch_sampler": NumPysOrder()}
    elif what.get("sampler") == "weighted":
        arguments["sampler"] = WeightedRandomSampler([1.0] * LENGTH, LENGTH)
    return prepare_data_loader(DataLoader(data, **arguments), **what.get("options", {}))


def go_on(kind: str, seed: int, state: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Go through two epochs, or through what is left of them at a state.

    Return for each round its epoch and samples, the rank's batch (with the samples that complete a round) and numbers
    that were drawn; the state after each round, and at the end of the first epoch.
    """
    loader = make(kind, seed, **options)
    if state is not None:
        load(loader, state)
    rounds: list[Any] = []
    batches, drawn, states, ends = [], [], [], []
    while (epoch := loader.iteration) < 2:
        for batch in loader:
            rounds.append((epoch, gather_for_metrics(batch, loader).tolist()))
            batches.append(batch.tolist())
            drawn.append((torch.rand(()).item(), random.random()))
            states.append(states_now(loader))
        ends.append(states_now(loader))
    return {"rounds": rounds, "batches": batches, "drawn": drawn, "states": states, "end": ends[0]}


def states_now(loader: Any) -> dict[str, Any]:
    return {"loader": loader.state_dict(), "generators": capture_rng_states()}


def load(loader: Any, state: dict[str, Any]) -> None:
    loader.load_state_dict(state["loader"])
    restore_rng_states(state["generators"])


def samples(rounds: list[Any]) -> list[list[int]]:
    return [[sample for in_epoch, batch in rounds for sample in batch if in_epoch == epoch] for epoch in range(2)]


@pytest.mark.parametrize(
    ("kind", "num_processes"), [*((kind, 2) for kind in LOADERS), ("shuffled", 1), ("numpy", 1), ("stream, workers", 1)]
)
def test_resumed_run_is_bit_for_bit_equal_and_other_ranks_go_on_in_the_same_order(ranks, kind, num_processes):
    through = ranks.run(num_processes, go_on, kind, 1)
    rounds, states = through[0]["rounds"], through[0]["states"]
    length = sum(epoch == 0 for epoch, _ in rounds)
    stops = {done: states[done - 1] for done in (2, length - 1, length + 2)} | {length: through[0]["end"]}
    rests = ranks.run(num_processes, lambda: [go_on(kind, 2, state) for state in stops.values()])
    for done, *rest in zip(stops, *rests, strict=True):
        for rank in range(num_processes):
            for what in ("rounds", "batches"):
                assert rest[rank][what] == through[rank][what][done:], (what, done)
        # The ranks of a dispatching loader draw alike, so that the states of rank 0 will do for all.
        for rank in (0, -1) if kind == "dispatched, lasting workers" else (0,):
            assert rest[rank]["drawn"] == through[0]["drawn"][done:], done
    assert through[0]["end"]["loader"]["has_seeded_workers"] is ("lasting workers" in kind)
    for other in {2: (1, 3)}.get(num_processes, ()):
        rest = ranks.run(other, go_on, kind, 2, states[1])
        assert all(loop["rounds"] == rest[0]["rounds"] for loop in rest)
        joined = samples(rounds[:2] + rest[0]["rounds"])
        if kind not in ORDER_OF_RANKS:
            assert joined[0] == samples(rounds)[0]
        if kind != "weighted":
            assert [sorted(epoch) for epoch in joined] == [list(range(LENGTH))] * 2


def test_another_batch_size_resumes_with_every_sample_once(ranks):
    through = ranks.run(2, go_on, "seedable", 1)[0]
    rest = ranks.run(1, lambda: go_on("seedable", 2, through["states"][1], batch_size=10))[0]
    assert samples(through["rounds"][:2] + rest["rounds"]) == samples(through["rounds"])


@pytest.mark.parametrize("kind", ["shuffled", "numpy", "dispatched", "split"])
def test_rest_of_an_epoch_is_completed_from_its_start(ranks, kind):
    def read() -> list[Any]:
        found = []
        for skip in (0, 3):
            loader = make(kind, 1)
            rest = [batch.tolist() for batch in (skip_first_batches(loader, skip) if skip else loader)]
            found.append((rest, [batch.tolist() for batch in loader], torch.rand(()).item()))
        return found

    for (whole, *others), (part, *same) in ranks.run(2, read):
        assert (part, same) == (whole[3:], others)


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def states_of(loader: Any, epochs: int) -> tuple[list[list[list[int]]], list[Any]]:
    """Return the batches of some epochs, and the states of the loader and of the generators at each batch."""
    seen: list[list[list[int]]] = []
    states: list[Any] = []
    for _ in range(epochs):
        seen.append([])
        for batch in loader:
            seen[-1].append(batch.tolist())
            states.append(states_now(loader))
    return seen, states


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "seedable", "stream", "dispatched"])
def test_skipping_by_hand_after_loading_counts_from_the_start_of_an_epoch(kind):
    epochs, states = states_of(make(kind, 1), 3)
    last = len(epochs[0]) - 1
    for at, skip, expected in ((2, 3, [epochs[0][3:], epochs[1]]), (2, 0, epochs[:2]), (last, 0, epochs[1:])):
        other = make(kind, 2)
        load(other, states[at])
        assert [lists(skip_first_batches(other, skip)), lists(other)] == expected
    chosen = make(kind, 2)
    load(chosen, states[last])
    chosen.set_epoch(1)
    assert chosen.state_dict()["epoch"] == 1
    assert lists(chosen) == epochs[1]


def test_state_without_the_newer_fields_is_loaded_and_one_of_another_kind_refused():
    state = states_of(make("shuffled", 1), 1)[1][2]["loader"]
    rest = [make("shuffled", 2), make("shuffled", 2)]
    rest[0].load_state_dict(state)
    for name in ("is_complete", "was_evaluation", "later", "has_seeded_workers"):
        del state[name]
    rest[1].load_state_dict(state)
    assert lists(rest[1]) == lists(rest[0])
    with pytest.raises(ValueError, match=r"a state without 'epoch'\. .* and this has \['_num_yielded'\]"):
        rest[0].load_state_dict({"_num_yielded": 3})


class Noting:
    """Numbers, and a note of those that were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


def simple() -> Any:
    data: Any = Noting()
    return prepare_data_loader(DataLoader(data, batch_size=2))


def test_loader_resumes_where_a_loop_was_left_and_loads_nothing_of_what_was_consumed_or_is_skipped():
    loader = simple()
    for batch in loader:
        if batch[0] == 4:
            break
    state = loader.state_dict()
    assert state["samples"] == 6
    for epoch, first in ((None, 6), (0, 6), (3, 0)):  # Another epoch forgets the position.
        other = simple()
        other.load_state_dict(state)
        if epoch is not None:
            other.set_epoch(epoch)
        assert lists(other) == [[at, at + 1] for at in range(first, 10, 2)]
        assert other.dataset.loaded == list(range(first, 10))
    assert lists(loader)[0] == [0, 1]  # Here, the next loop begins anew.
    loader.dataset.loaded.clear()
    for _ in skip_first_batches(loader, 2):
        break
    assert min(loader.dataset.loaded) == 4
    other.load_state_dict(loader.state_dict())
    assert lists(other) == [[6, 7], [8, 9]]


@pytest.mark.parametrize("kind", [DataLoaderShard, SkipDataLoader])
def test_loader_that_always_skips_resumes(kind):
    loaders = [kind(range(10), batch_size=2, skip_batches=2) for _ in range(2)]
    next(iter(loaders[0]))
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert lists(loaders[1]) == [[6, 7], [8, 9]]
    assert lists(loaders[1]) == [[4, 5], [6, 7], [8, 9]]
