"""Ranks that are killed while they save a sharded model: the previous save or the new one is whole."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from notebook_launcher.training.accelerator import Accelerator
from notebook_launcher.training.parallelism.fsdp_plugin import FullyShardedDataParallelPlugin
from tests.support.killing import NEVER, check, start_killed, survey_others, were_killed
from tests.support.toy_training import shards_on_cpus


def make(number: int, size: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and an optimizer that hold one number in all their parts."""
    model = torch.nn.Linear(size, size, bias=False)
    torch.nn.init.constant_(model.weight, number)
    return model, torch.optim.SGD(model.parameters(), lr=0.25 * number)


def load(target: Path, size: int) -> str:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make(3, size))
    accelerator.load_state(target)
    (number,) = {*model.weight.flatten().tolist(), optimizer.param_groups[0]["lr"] / 0.25}
    return {1: "old", 2: "new"}[int(number)]


class Rank:
    """A process that saves a sharded model."""

    def __init__(self, target: Path, number: int) -> None:
        self.target = target
        self.number = number
        self.accelerator: Any = None

    def join_alone(self) -> None:
        """Prepare a model that the user has sharded over this process alone."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model, _ = make(self.number, 1)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25 * self.number))

    def join(self, rank: int, store: str) -> None:
        """Prepare a model that two ranks share out."""
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        self.accelerator.prepare(*make(self.number, 2))

    def save(self) -> None:
        self.accelerator.save_state(self.target, state_dict_type="SHARDED_STATE_DICT")


def one_rank(folder: str) -> dict[str, Any]:
    """Survey saves of a model that is sharded over one rank."""
    torch.set_num_threads(1)
    target = Path(folder)

    def save(number: int, last_call: int) -> bool:
        rank = Rank(target, number)
        return were_killed([start_killed(last_call, rank.save, rank.join_alone)])

    return survey_others(save, lambda: load(target, 1), target)


@pytest.mark.slow
@shards_on_cpus
def test_sharded_state_is_the_old_one_or_the_new_one(run, tmp_path):
    check(run(one_rank, tmp_path / "parent" / "folder"), at_least=20)


def two_ranks(folder: str, victims: str) -> dict[str, Any]:
    """Survey saves of a model that two ranks share out, of which the victims, such as `01`, are killed."""
    torch.set_num_threads(1)
    target, numbers = Path(folder), itertools.count()

    def save(number: int, last_call: int) -> bool:
        store = str(target.parents[1] / f"store {next(numbers)}")
        children = []
        for at in range(2):
            rank = Rank(target, number)
            dies_before = last_call if str(at) in victims else NEVER
            children.append(start_killed(dies_before, rank.save, functools.partial(rank.join, at, store)))
        return were_killed(children)

    return survey_others(save, lambda: load(target, 2), target)


@pytest.mark.slow
@shards_on_cpus
@pytest.mark.parametrize("victims", ["0", "1", "01"], ids=["the rank that publishes", "its peer", "both"])
def test_sharded_state_of_two_ranks_is_the_old_one_or_the_new_one(run, tmp_path, victims):
    check(run(two_ranks, tmp_path / "parent" / "folder", victims), at_least=6)
