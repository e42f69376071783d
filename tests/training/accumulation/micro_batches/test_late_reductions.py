"""Ranks that read each other's words after a backward whose reduction is only queued, as with NCCL.

The group's work is done later than it returns; see `tests/support/late_group.py`. No GPU is used.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, notebook_launch
from notebook_launcher.training.requests import UpdateFence
from tests.support.late_group import join_late_group

if TYPE_CHECKING:
    from collections.abc import Iterator

AHEAD = "rank 0 is ahead"


class LateRank:
    """An Accelerator whose reductions are late, on ranks of which rank 0 runs ahead."""

    def __init__(self, **options: Any) -> None:
        group = join_late_group()
        self.accelerator = Accelerator(cpu=True, **options)
        self.rank = self.accelerator.process_index
        self._store: Any = dist.distributed_c10d._get_default_store()
        check = self.accelerator._micro_batches.rank_check
        assert check is not None
        record = group.record

        def wait_as_one_that_is_ahead() -> Any:
            self.tell_that_it_is_ahead()
            return record()

        group.record = wait_as_one_that_is_ahead  # type: ignore[method-assign]
        check._fence = check.left_out._fence = UpdateFence(group.record)

    def tell_that_it_is_ahead(self) -> None:
        if self.rank == 0:
            self._store.set(AHEAD, "1")

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Let rank 0 come out of this block, or wait in it for its device, before rank 1 enters it."""
        if self.rank == 1:
            self._store.wait([AHEAD])
        try:
            yield
        finally:
            self.tell_that_it_is_ahead()


def leave_out_alike() -> None:
    """Leave the same micro-batch out on both ranks."""
    late = LateRank(gradient_accumulation_steps=2)
    accelerator = late.accelerator
    data: Any = torch.ones(8, 1)
    leaf, loader = accelerator.prepare(torch.ones(1, requires_grad=True), DataLoader(data, 1))
    for number, batch in enumerate(loader):
        with accelerator.accumulate(leaf):
            if number == 0:
                continue
            with late.behind():
                accelerator.backward((leaf * batch).mean())
            break


def test_ranks_that_leave_out_the_same_agree_though_one_runs_ahead_of_its_device() -> None:
    notebook_launch(leave_out_alike, 2, output="none")


def diverge() -> str:
    """Train a leaf tensor that differs between the ranks; return the error of this rank."""
    late = LateRank()
    leaf: Any = late.accelerator.prepare(torch.ones(1, requires_grad=True))
    with torch.no_grad():
        leaf += late.rank
    with pytest.raises(RuntimeError) as raised, late.behind():
        late.accelerator.backward(leaf.sum())
    return str(raised.value)


def test_ranks_that_differ_all_raise_though_one_runs_ahead_of_its_device() -> None:
    for told in notebook_launch(diverge, 2, output="none"):
        assert told.startswith("update 1: the weights of the leaf tensors on rank 1 differ from those on rank 0")
