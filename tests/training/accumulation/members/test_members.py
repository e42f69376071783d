"""The protocol of members: each kind switches, is switched off and describes itself, and one file decides when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_launcher import notebook_launch
from notebook_launcher.training.accumulation.members import (
    LeafTensor,
    Member,
    PlainModel,
    ShardedModel,
    StrayParameters,
    SwitchOff,
    SyncedModel,
    ends_window,
    member_of,
    switch_back,
    switch_off,
    without_sync,
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
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    return {
        "plain": member_of(torch.nn.Linear(2, 1)),
        "sharded": member_of(FakeSharded()),
        "leaf": LeafTensor(torch.ones(2, requires_grad=True)),
        "stray": StrayParameters(optimizer),
    }


@pytest.mark.parametrize(
    ("name", "kind", "when", "text"),
    [
        ("plain", PlainModel, SwitchOff.NEVER, "Linear"),
        ("sharded", ShardedModel, SwitchOff.IF_ASKED, "FakeSharded"),
        ("leaf", LeafTensor, SwitchOff.ALWAYS, "a leaf tensor"),
        ("stray", StrayParameters, SwitchOff.NEVER, "parameters of SGD"),
    ],
)
def test_member_has_the_kind_switch_and_name_of_what_it_wraps(name, kind, when, text):
    member = make_members()[name]
    assert type(member) is kind
    assert member.switch_off is when
    assert member.describe() == text


@pytest.mark.parametrize("name", ["plain", "sharded", "leaf", "stray"])
def test_set_sync_returns_the_state_before(name):
    member: Member = make_members()[name]
    assert member.set_sync(False)
    assert member.set_sync(True) == (name != "leaf"), "of the others torch does not tell the state, or there is none"
    assert member.set_sync(True)


@pytest.mark.parametrize(
    ("sync_each_batch", "leaf", "sharded"), [(None, False, True), (False, False, False), (True, True, True)]
)
def test_switching_off_follows_sync_each_batch_and_switching_back_restores_it(sync_each_batch, leaf, sharded):
    members = make_members()
    switched_off = switch_off(members.values(), sync_each_batch=sync_each_batch)
    assert (members["leaf"].syncs, members["sharded"].module.switch) == (leaf, sharded)
    switch_back(switched_off)
    assert (members["leaf"].syncs, members["sharded"].module.switch) == (True, True)


def test_without_sync_switches_every_member_off_and_restores_nested_states():
    members = make_members()
    with without_sync(members.values()):
        with without_sync([members["leaf"]]):
            assert not members["leaf"].syncs
        assert not members["leaf"].syncs
        assert not members["sharded"].module.switch
    assert members["leaf"].syncs
    assert members["sharded"].module.switch


@pytest.mark.parametrize(
    ("num_batches", "at_end", "expected"), [(1, False, False), (4, False, True), (1, True, True), (4, True, True)]
)
def test_window_ends_when_full_or_at_the_end_of_its_loader(num_batches, at_end, expected):
    assert ends_window(num_batches, 4, is_last=at_end) is expected


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
