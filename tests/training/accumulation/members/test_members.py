"""Members that a window switches off, by their kind and by `sync_each_batch`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher import notebook_launch
from notebook_launcher.training.accumulation.members import (
    LeafTensor,
    SyncedModel,
    member_of,
    switch_back,
    switch_off,
)


class FakeSharded(torch.nn.Linear):
    """Has the switch that `fully_shard` gives a module."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.switch = True

    def set_requires_gradient_sync(self, on: bool) -> None:
        self.switch = on

    def set_requires_all_reduce(self, on: bool) -> None:
        """Do nothing: there is one replica."""

    def reshard(self) -> None:
        """Do nothing: no forward has gathered parameters."""


def make_members() -> dict[str, Any]:
    return {"sharded": member_of(FakeSharded()), "leaf": LeafTensor(torch.ones(2, requires_grad=True))}


@pytest.mark.parametrize(
    ("sync_each_batch", "leaf", "sharded"), [(None, False, True), (False, False, False), (True, True, True)]
)
def test_switching_off_follows_sync_each_batch_and_switching_back_restores_it(sync_each_batch, leaf, sharded):
    members = make_members()
    switched_off = switch_off(members.values(), sync_each_batch=sync_each_batch)
    assert (members["leaf"].syncs, members["sharded"].module.switch) == (leaf, sharded)
    switch_back(switched_off)
    assert (members["leaf"].syncs, members["sharded"].module.switch) == (True, True)


def test_prepared_model_is_switched_off_and_a_model_that_the_user_wrapped_is_not():
    def kinds() -> list[Any]:
        ours, theirs = (
            member_of(SyncedModel(torch.nn.Linear(2, 1))),
            member_of(DistributedDataParallel(torch.nn.Linear(2, 1))),
        )
        switched_off = switch_off([ours, theirs], sync_each_batch=None)
        switches = [model.module.require_backward_grad_sync for model in (ours, theirs)]
        switch_back(switched_off)
        return [type(ours).__name__, type(theirs).__name__, switches, ours.set_sync(True), ours.describe()]

    results = notebook_launch(kinds, 2, output="none")
    assert list(results) == [["PreparedModel", "DDPModel", [False, True], True, "Linear"]] * 2
