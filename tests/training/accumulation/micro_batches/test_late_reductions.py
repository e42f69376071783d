"""Ranks that read each other's words after a backward whose reduction is only queued, as with NCCL.

The group's work is done later than its call returns. No GPU is used.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, notebook_launch
from notebook_launcher.training.requests import UpdateFence

if TYPE_CHECKING:
    from collections.abc import Iterator

AHEAD = "rank 0 is ahead"


class LateWork(dist.Work):
    """Work that is done later than its `wait()` returns: NCCL's holds up the stream, and not the program."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class LateGroup(dist.ProcessGroup):
    """A group over gloo whose all-reduces are done when all ranks have begun them, which no program waits for.

    All ranks must reduce equal numbers: the sum is there at once, because a CPU has no stream to order reads by.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._size = size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._queued: list[Any] = []

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "late"

    def allreduce(self, tensors: Any, _options: Any = None) -> Any:  # type: ignore[override]
        for tensor in tensors:
            tensor.mul_(self._size)
        self._queued.append(self._gloo.allreduce([torch.ones(1)]))
        return LateWork()

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._gloo.broadcast(tensors, options)

    def allgather(self, outputs: Any, inputs: Any, _options: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs)

    def _allgather_base(self, output: Any, mine: Any, _options: Any = None) -> Any:
        return self._gloo._allgather_base(output, mine)

    all_gather_single: Any = _allgather_base  # Its name since torch 2.13.

    def barrier(self, _options: Any = None) -> Any:
        return self._gloo.barrier()

    def record(self) -> Any:
        """Return the end of what is queued now, as an event that was recorded would be."""
        queued = list(self._queued)
        return SimpleNamespace(synchronize=lambda: [work.wait() for work in queued])


def join_late_group() -> LateGroup:
    """Make a late group the default group of this rank, which all ranks must do, once; return it."""
    made: list[LateGroup] = []

    def make(*args: Any) -> LateGroup:
        made.append(LateGroup(*args))
        return made[0]

    dist.Backend.register_backend("late", make, devices=["cpu"])
    dist.destroy_process_group()
    dist.init_process_group("late")
    return made[0]


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
