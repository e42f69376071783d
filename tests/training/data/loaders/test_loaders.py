"""Prepared loaders in one process: what they are, what they say of themselves, and what they leave behind."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from notebook_launcher.training.accumulation.windows import ActiveLoaders
from notebook_launcher.training.data.prepare import prepare_data_loader, skip_first_batches
from notebook_launcher.training.data.samplers import SeedableRandomSampler, get_sampler
from tests.support.toy_loaders import Opaque, Stream

LOADERS = {
    "map": {},
    "stream": {"put_on_device": True, "device": torch.device("cpu")},
    "stream, not dispatched": {"dispatch_batches": False},
    "dispatched": {"dispatch_batches": True},
}


def plain(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, **options)


def make(kind: str, length: int = 10, **options: Any) -> Any:
    data: Any = Stream(length) if "stream" in kind else range(length)
    return prepare_data_loader(plain(data, batch_size=4, **options), **LOADERS[kind])  # type: ignore[arg-type]


@pytest.fixture(params=LOADERS)
def loader(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


def test_prepared_loader_knows_last_batch_and_weights(loader):
    seen = [(loader.end_of_dataloader, loader.current_round.rows) for _ in loader]
    assert seen == [(False, (4,)), (False, (4,)), (True, (2,))]
    assert (loader.end_of_dataloader, loader.current_round, loader.iteration_token) == (False, None, None)


def test_loader_is_active_while_iterated(loader):
    inner = make("map")
    loader.active_loaders = inner.active_loaders = active_loaders = ActiveLoaders()
    for _ in loader:
        assert active_loaders.active is loader
        for _ in inner:
            assert active_loaders.loaders == [loader, inner]
        assert active_loaders.active is loader
    assert active_loaders.loaders == []


def leave_by_exception(loader: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError


def leave_by_closing(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator)
    iterator.close()


def test_leaving_a_loop_leaves_nothing_behind(loader):
    for leave in (lambda loader: next(iter(loader)), leave_by_exception, leave_by_closing):
        leave(loader)
        assert loader.active_loaders.loaders == []
        assert loader.iteration_token is None
        assert loader.iteration == 0
        loader.set_epoch(5)
        assert [len(batch) for batch in loader] == [4, 4, 2]
        assert loader.iteration == 6
        loader.set_epoch(0)


def test_loop_over_the_same_loader_inside_a_loop_sees_all_batches(loader):
    for count, _ in enumerate(loader):
        token = loader.iteration_token
        assert [len(batch) for batch in loader] == [4, 4, 2]
        if count == 0:
            assert loader.iteration == 1
        assert loader.iteration_token is token
    assert loader.iteration_token is None
    assert loader.active_loaders.loaders == []


@pytest.mark.parametrize("kind", LOADERS)
def test_nothing_keeps_a_loader_alive(kind):
    gc.disable()
    try:
        loader = make(kind)
        iterator = iter(loader)
        next(iterator)
        reference = weakref.ref(loader)
        del loader, iterator
        assert reference() is None
    finally:
        gc.enable()


def test_loader_pickles_and_copies_inside_a_loop(loader):
    for _ in loader:
        for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
            assert type(other) is type(loader)
            assert [len(batch) for batch in other] == [4, 4, 2]
            assert loader.active_loaders.active is loader


@pytest.mark.parametrize("kind", LOADERS)
def test_len_counts_batches_of_this_rank(kind):
    loader = make(kind)
    assert loader.total_batch_size == 4
    if "stream" in kind:
        with pytest.raises(TypeError, match="has no len"):
            len(loader)
        return
    assert (len(loader), loader.total_dataset_length) == (3, 10)
    next(iter(loader))
    assert [loader.remainder for _ in loader] == [2, 2, 2]
    assert [loader.remainder for _ in make(kind, drop_last=True)] == [-1, -1]
    assert len(make(kind, drop_last=True)) == 2


def test_batch_sampler_in_place_of_a_sampler_deals_whole_batches():
    sampler = BatchSampler(SequentialSampler(range(22)), batch_size=4, drop_last=False)
    users = plain(torch.arange(22), sampler=sampler, batch_size=None)
    loader = prepare_data_loader(users, num_processes=2, process_index=1)
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 0, 1]]
    assert get_sampler(loader) is sampler.sampler


class Epochs(list[list[int]]):
    """Batches of the user's own, of which the first begins with the epoch."""

    batch_size, drop_last = 4, False

    def set_epoch(self, epoch: int) -> None:
        self[0][0] = epoch


@pytest.mark.parametrize("num_processes", [1, 2])
def test_batch_sampler_of_the_users_own_is_used_and_gets_the_epoch(num_processes):
    sampler = Epochs([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
    users = plain(range(10), batch_sampler=sampler)
    loader = prepare_data_loader(users, num_processes=num_processes, process_index=0)
    assert getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler) is sampler
    loader.set_epoch(7)
    assert next(iter(loader)).tolist() == [7, 1, 2, 3]
    assert get_sampler(loader) is None


def test_batches_of_any_type_are_moved():
    Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 - the type that must be kept

    def collate(items: list[int]) -> Any:
        return Opaque(torch.tensor(items)), Point(torch.tensor(items), "name"), {"n": len(items), "t": None}

    users = plain(range(4), batch_size=4, collate_fn=collate)
    custom, point, rest = next(iter(prepare_data_loader(users, torch.device("cpu"), put_on_device=True)))
    assert custom.moved
    assert (type(point), point.y, rest) == (Point, "name", {"n": 4, "t": None})
    assert not next(iter(prepare_data_loader(users)))[0].moved


def test_data_exception_is_raised_at_the_same_batch_as_in_torch():
    class Broken(Stream):
        def __iter__(self):
            yield from range(6)
            raise ZeroDivisionError

    for dispatch in (False, True):
        loader = prepare_data_loader(plain(Broken(0), batch_size=2), dispatch_batches=dispatch)
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(ZeroDivisionError):
            next(iterator)
        assert loader.active_loaders.loaders == []


def test_loop_draws_as_torchs_own_loader_does():
    class Noisy:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: Any) -> Any:
            return index + torch.rand(())

    def draw(loader: Any) -> list[list[float]]:
        torch.manual_seed(4)
        return [[*batch.tolist(), torch.rand(()).item()] for _ in range(2) for batch in loader]

    users = plain(Noisy(), batch_size=4, shuffle=True)
    assert draw(prepare_data_loader(users)) == draw(users)


def test_profiler_sees_the_loader():
    with torch.autograd.profiler.profile() as profile:
        list(make("map"))
    assert any("enumerate(DataLoader)" in event.key for event in profile.key_averages())


def test_dispatching_needs_the_ranks():
    loader = prepare_data_loader(plain(range(9)), None, 2, 0, dispatch_batches=True)
    with pytest.raises(RuntimeError, match="deals out to 2 ranks, and the process group has 1"):
        next(iter(loader))


# --------------------------------------------------------------------------------------------------------------------
# Loaders that skip batches at the beginning of an epoch, and load nothing of them.


@pytest.mark.parametrize("kind", [*LOADERS, "plain", "plain stream"])
def test_first_batches_are_skipped(kind):
    if kind in LOADERS:
        whole: Any = make(kind)
    else:
        whole = plain(Stream(10) if "stream" in kind else range(10), batch_size=4)
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for number in (0, 1, 2, 9):
        rest = skip_first_batches(whole, number)
        assert [batch.tolist() for batch in rest] == batches[number:]
        twice = skip_first_batches(skip_first_batches(whole, number), 1)
        assert [batch.tolist() for batch in twice] == batches[number + 1 :]
        if "stream" not in kind:
            assert len(rest) == len(batches[number:])


class OwnBatches:
    """A user's batch sampler, which is none of torch's, or one that changes the batches of another."""

    def __init__(self, sampler: Any, *, around: bool = False) -> None:
        self.batches = BatchSampler(sampler, 2, drop_last=False)
        if around:
            self.batch_sampler = self.batches
        else:
            self.sampler = sampler

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize(
    ("around", "num_processes", "dispatch"), [(False, 2, False), (True, 1, False), (False, 1, True)]
)
def test_skipping_keeps_the_epoch_of_a_seedable_sampler_under_a_users_batch_sampler(around, dispatch, num_processes):
    sampler = SeedableRandomSampler(range(10), data_seed=3)
    users = plain(range(10), batch_sampler=OwnBatches(sampler, around=around))
    plain_epochs = [[batch.tolist() for batch in users] for _ in range(4)]
    share = slice(0, None, num_processes)

    def rest_of(whole: Any, number: int) -> Any:
        return [batch.tolist() for batch in skip_first_batches(whole, number)]

    sampler.set_epoch(3)  # by the user, who resumes, before the loader is prepared
    loader = prepare_data_loader(users, None, num_processes, 0, dispatch_batches=dispatch)
    assert rest_of(loader, 1) == plain_epochs[3][share][1:]
    sampler.set_epoch(1)
    assert rest_of(loader, 2) == plain_epochs[1][share][2:]
    assert (loader.iteration, sampler.epoch) == (2, 2)
    assert rest_of(loader, 0) == plain_epochs[2][share]
    loader.set_epoch(0)
    assert rest_of(loader, 1) == plain_epochs[0][share][1:]


def test_seedable_sampler_goes_into_the_batch_sampler_that_draws():
    users = plain(range(10), batch_sampler=OwnBatches(RandomSampler(range(10)), around=True))
    loader = prepare_data_loader(users, use_seedable_sampler=True, data_seed=3)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    loader.set_epoch(0)
    assert [batch.tolist() for batch in skip_first_batches(loader, 1)] == epochs[0][1:]
    assert epochs[0] != epochs[1]


def test_seedable_sampler_that_replaces_another_keeps_its_epoch():
    sampler = SeedableRandomSampler(range(10), data_seed=5)
    sampler.set_epoch(4)
    loader = prepare_data_loader(
        plain(range(10), sampler=sampler, batch_size=2), use_seedable_sampler=True, data_seed=5
    )
    once = [batch.tolist() for batch in loader]
    sampler.set_epoch(4)
    assert [index for batch in once for index in batch] == list(sampler)


def test_reset_in_a_loop_leaves_the_loop_to_go_on(loader):
    assert sum(1 for _ in loader if loader.reset() is None) == 3
