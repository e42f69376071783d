"""Loaders skip batches at the beginning of an epoch, and load nothing of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, RandomSampler

from notebook_launcher.training.data import SeedableRandomSampler, prepare_data_loader, skip_first_batches
from tests.support.toy_loaders import LOADERS, Rows, Stream, make, plain


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


def test_nothing_is_loaded_of_what_is_skipped():
    loaded = []

    class Data(Rows):
        def __getitem__(self, index: Any) -> Any:
            loaded.append(index)
            return index

    list(skip_first_batches(prepare_data_loader(plain(Data(10), batch_size=4)), 2))
    assert loaded == [8, 9]


class OwnBatches:
    """A user's batch sampler, which is none of torch's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        return iter(BatchSampler(self.sampler, 2, drop_last=False))

    def __len__(self) -> int:
        return len(BatchSampler(self.sampler, 2, drop_last=False))


class OuterBatches:
    """One that changes the batches of another."""

    def __init__(self, sampler: Any) -> None:
        self.batch_sampler = BatchSampler(sampler, 2, drop_last=False)

    def __iter__(self) -> Any:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


@pytest.mark.parametrize(
    ("batches", "num_processes", "dispatch"), [(OwnBatches, 2, False), (OuterBatches, 1, False), (OwnBatches, 1, True)]
)
def test_skipping_keeps_the_epoch_of_a_seedable_sampler_under_a_users_batch_sampler(batches, dispatch, num_processes):
    sampler = SeedableRandomSampler(range(10), data_seed=3)
    plain_epochs = [[batch.tolist() for batch in plain(range(10), batch_sampler=batches(sampler))] for _ in range(4)]
    share = slice(0, None, num_processes)

    def rest_of(whole: Any, number: int) -> Any:
        return [batch.tolist() for batch in skip_first_batches(whole, number)]

    sampler.set_epoch(3)  # by the user, who resumes, before the loader is prepared
    users = plain(range(10), batch_sampler=batches(sampler))
    loader = prepare_data_loader(users, None, num_processes, 0, dispatch_batches=dispatch)
    assert rest_of(loader, 1) == plain_epochs[3][share][1:]
    sampler.set_epoch(1)
    assert rest_of(loader, 2) == plain_epochs[1][share][2:]
    assert (loader.iteration, sampler.epoch) == (2, 2)
    assert rest_of(loader, 0) == plain_epochs[2][share]
    loader.set_epoch(0)
    assert rest_of(loader, 1) == plain_epochs[0][share][1:]


def test_seedable_sampler_goes_into_the_batch_sampler_that_draws():
    users = plain(range(10), batch_sampler=OuterBatches(RandomSampler(range(10))))
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
