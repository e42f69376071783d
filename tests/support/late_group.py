"""A process group whose reductions are done later than its calls return, as NCCL's are: over gloo, of two ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


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
