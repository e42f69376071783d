"""Steps that all ranks take together: a failure on one rank is an error on all, and no rank waits for ever."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from notebook_launcher.training.checkpoints.folders import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from notebook_launcher.training.process.process_state import ProcessState

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Writers:
    """The ranks that share a folder: all ranks, or the ranks of one machine."""

    leader: int
    """The rank that writes the files that are written once."""
    index: int
    """The place of this rank among the writers."""
    size: int

    @classmethod
    def of(cls, process: ProcessState, *, on_each_node: bool) -> Writers:
        """Return the writers that this rank is one of."""
        rank, num_processes = process.process_index, process.num_processes
        if not on_each_node:
            return cls(0, rank, num_processes)
        local = process.local_process_index
        return cls(rank - local, local, int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)))

    @property
    def spans_machines(self) -> bool:
        """True if some of the writers are on other machines than the leader."""
        return self.size > int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @property
    def leads(self) -> bool:
        """True on the leader."""
        return self.index == 0


def on_all_ranks(doing: str, step: Callable[[], T]) -> T:
    """Run a step on every rank, and return this rank's result once all ranks have finished.

    Where a rank's step failed, that rank raises its error, and the others a `CheckpointError` with the error's text and
    what the rank was `doing`: `"write the checkpoint"`.
    """
    outcome: list[T] = []
    gather_outcomes(doing, lambda: outcome.append(step()))
    return outcome[0]


def gather_outcomes(doing: str, step: Callable[[], T]) -> list[T]:
    """Run a step as `on_all_ranks` does, and return the results of all ranks in rank order; they must pickle."""
    outcome: Any = None
    failure: Exception | None = None
    try:
        outcome = step()
    except Exception as error:  # raised below, once the other ranks know of it
        failure = error
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    by_rank: list[Any] = [(outcome, message)]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        by_rank *= dist.get_world_size()
        dist.all_gather_object(by_rank, (outcome, message))
    if failure is not None:
        raise failure
    for rank, (_, trouble) in enumerate(by_rank):
        if trouble is not None:
            raise CheckpointError(f"rank {rank} could not {doing}: {trouble}")
    return [one for one, _ in by_rank]


def run_each(steps: Iterable[Callable[[], Any]]) -> None:
    """Run steps in which ranks wait for each other, all of them; then raise the first failure of this rank."""
    failures = []
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: PERF203 - raised once no rank waits for this one
            failures.append(error)
    if failures:
        raise failures[0]


def writes_here(*, on_each_node: bool = False) -> bool:
    """Return True on the rank that writes the files that are written once: rank 0, or each machine's first rank."""
    if on_each_node:
        return int(os.environ.get("LOCAL_RANK", "0")) == 0
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
