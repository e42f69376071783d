"""One rank's share of an iterable data set that every rank reads."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from notebook_launcher.training.data.completing import uneven_error
from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.data.sampling.samplers import length_of
from notebook_launcher.training.data.split_batches import check_split
from notebook_launcher.training.operations import find_batch_size

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["IterableDatasetShard", "StreamRound"]


class StreamRound(NamedTuple):
    """One rank's elements of a round."""

    elements: list[Any]
    round: Round | None
    """The counts of the round; None: every rank has a full batch."""
    consumed: int
    """Elements of the stream that all ranks together have had, with this round."""


class IterableDatasetShard(IterableDataset[Any]):
    """The elements that one rank gets of an iterable data set.

    A round is `batch_size` elements for every rank, or with `split_batches` for all of them together; rank r
    gets the r-th part of it. Where the last round is not full:

    - `drop_last`: it is left out;
    - `even_batches`: it is filled with elements from the start, for all ranks;
    - otherwise `uneven` decides what ranks get that have no element left: `"weigh"` (the first rank's, with
      weight 0), `"stop"` (the round is left out) or `"error"` (ValueError). `"leave"` is as `even_batches`, since
      Accelerate always fills it.

    Args:
        dataset: Stream that is shared out. Its `set_epoch`, or else a `generator` that it has, gets the epoch.
        batch_size: None: each element is a batch, and a round is one of them for every rank.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
        uneven: str = "leave",
    ) -> None:
        if split_batches:
            check_split(batch_size, num_processes, "batch_size is None")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.uneven = uneven
        self.epoch = 0

    @property
    def per_rank(self) -> int:
        """Elements of a full round for one rank."""
        if self.batch_size is None:
            return 1
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def per_round(self) -> int:
        """Elements of a full round for all ranks."""
        return self.per_rank * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, if the data set has several."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds, left = divmod(len(self.dataset), self.per_round)
        complete = left and not self.drop_last and not (self._stops() and left <= self.per_round - self.per_rank)
        return (rounds + bool(complete)) * self.per_rank

    def check(self) -> None:
        """Raise ValueError if `uneven="error"` and it is known that the last round is not for all ranks."""
        length = length_of(self.dataset)
        if length is not None and self._refuses() and not self.drop_last:
            left = length % self.per_round
            if 0 < left <= self.per_round - self.per_rank:
                raise uneven_error(f"{left} of {self.per_round} samples are left for the last round")

    def __iter__(self) -> Iterator[Any]:
        for part in self.rounds():
            yield from part.elements

    def rounds(self, skip: int = 0) -> Iterator[StreamRound]:
        """Yield this rank's elements, round by round, beginning with a round without elements.

        Args:
            skip: Number of consumed elements of the stream; they are read when the empty round is asked for.

        Raises:
            ValueError: With `uneven="error"`, where the data set ends with some ranks' elements only.
        """
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        stream = iter(self.dataset)
        start = list(itertools.islice(stream, min(skip, self.per_round)))
        skip = len(start) + sum(1 for _ in itertools.islice(stream, skip - len(start)))
        yield StreamRound([], None, skip)
        while current := list(itertools.islice(stream, self.per_round)):
            start += current[: self.per_round - len(start)]
            skip += len(current)
            if len(current) == self.per_round:
                parts = self._cut(current)
                drawn = self._count(parts, parts, parts) if self.batch_size is None else None
                yield StreamRound(parts[self.process_index], drawn, skip)
            elif not self.drop_last:
                yield from self._tail(current, start, skip)

    def _tail(self, current: list[Any], start: list[Any], skip: int) -> Iterator[StreamRound]:
        real = self._cut(current)
        if self.even_batches or self.uneven == "leave":
            missing = self.per_round - len(current)
            parts = self._cut([*current, *itertools.islice(itertools.cycle(start), missing)])
            weighed = parts
        else:
            if self._stops() and not real[-1]:
                return
            if self._refuses() and not real[-1]:
                raise uneven_error(f"{len(current)} of {self.per_round} samples are left for the last round")
            parts = [part or real[0] for part in real]
            weighed = real
        yield StreamRound(parts[self.process_index], self._count(parts, real, weighed), skip)

    def _cut(self, elements: list[Any]) -> list[list[Any]]:
        size = self.per_rank
        return [elements[rank * size : (rank + 1) * size] for rank in range(self.num_processes)]

    def _count(self, rows: list[list[Any]], real: list[list[Any]], weighed: list[list[Any]]) -> Round:
        return Round(self._counts(rows), self._counts(real), self._counts(weighed))

    def _counts(self, parts: list[list[Any]]) -> tuple[int, ...]:
        if self.batch_size is None:
            return tuple(sum(find_batch_size(batch) or 1 for batch in part) for part in parts)
        return tuple(map(len, parts))

    def _refuses(self) -> bool:
        return not self.even_batches and self.uneven == "error"

    def _stops(self) -> bool:
        return not self.even_batches and self.uneven == "stop"
