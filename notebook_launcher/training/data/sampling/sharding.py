"""One rank's share of a batch sampler, with the other ranks' shares of the same round.

Every rank walks through the whole batch sampler, which costs indices and no data; so each knows, round by
round, how many samples all of them have.
"""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler

from notebook_launcher.training.data.completing import fill, keep_step, uneven_error
from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.data.sampling.samplers import count_samples, length_of
from notebook_launcher.training.data.sampling.shares import (
    Share,
    Stretch,
    batches_of,
    full_rounds,
    shares_in,
    split_at,
    stream_of,
)
from notebook_launcher.training.data.split_batches import check_split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["BatchSamplerShard"]


class _Group(enum.Enum):
    """The batches of a round, when they are cut."""

    FULL = "there is one of full size for every rank"
    SHORT = "the last one is short, and others follow"
    LAST = "there are not enough, or the last one is short, and none follows"


class BatchSamplerShard(BatchSampler):
    """The batches that one rank gets.

    Rank r of N gets batches r, N + r, 2N + r, ..., or with `split_batches` its slice of every batch. Where the
    last round has less than a batch for every rank:

    - `even_batches`: it is filled with samples from the epoch's start, so that all ranks have as many batches
      of `batch_size`; with a batch sampler that has none, with whole batches from the start;
    - otherwise `uneven` decides: `"leave"` (ranks without a batch end sooner), `"weigh"` (they get their last
      batch again, with weight 0), `"stop"` (the round is left out) or `"error"` (ValueError);
    - a batch sampler with `drop_last` leaves it out in any case.

    Attributes:
        batch_sampler: Source of the batches that are shared out.
        batch_size: Its `batch_size`; None if it has none.
        drop_last: Its `drop_last`; False if it has none.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        uneven: str = "leave",
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.uneven = uneven
        self.first_round: list[Any] | None = None
        """The batches of all ranks with which the last iteration began, as this rank drew them; None for torch's own
        samplers, whose order all ranks share."""
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if split_batches:
            check_split(self.batch_size, num_processes, f"this {type(batch_sampler).__name__} has no batch_size")

    @property
    def total_length(self) -> int:
        """Number of batches of all ranks."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        num_batches = len(self.batch_sampler)
        if self.split_batches:
            return num_batches - (self._stops() and self._misses_tail(self.num_processes - 1))
        rounds, left = divmod(num_batches, self.num_processes)
        if not left or self.drop_last or self._stops():
            return rounds
        if self.even_batches or self.uneven == "weigh":
            return rounds + 1
        return rounds + (self.process_index < left)

    def __iter__(self) -> Iterator[Any]:
        for share in self.shares():
            if share.indices is None:
                return
            yield share.indices

    def shares(self, skip: int = 0) -> Iterator[Share]:
        """Yield this rank's batches with their rounds; see `stretches`."""
        return shares_in(self.stretches(skip))

    def stretches(self, skip: int = 0) -> Iterator[Stretch]:
        """Yield this rank's batches with their rounds.

        Args:
            skip: Number of samples of the epoch that were consumed; the rest is shared out. A batch of which only a
                part is left comes as that part.

        Raises:
            ValueError: With `uneven="error"`, at a round that has less than a batch for every rank.
        """
        stream, size = stream_of(self.batch_sampler), self.batch_size
        if stream is None or not size or skip % size:
            batches = batches_of(self.batch_sampler, stream)
            start = list(itertools.islice(batches, self._per_round))
            self.first_round = list(start) if stream is None else None
            before, batches = split_at(itertools.chain(start, batches), skip, self._per_round)
            is_round = len(before) == self._per_round
            previous = (self._cut(before[0]) if self.split_batches else before) if is_round else []
            yield from self._irregular(batches, start, previous, skip)
            return
        self.first_round = None
        num_processes, rows = self.num_processes, size // self.num_processes if self.split_batches else size
        per_round = num_processes * rows
        epochs_start = stream.take(per_round)
        stream.give_back(epochs_start)
        stream.skip(skip - per_round)
        # At the end of the epoch, some ranks may get their batch of the round before again.
        newest = stream.take(min(skip, per_round))
        full = (rows,) * num_processes
        drawn = Round(full, full, full)
        for block in full_rounds(stream, stream.length - skip, num_processes, rows):
            yield Stretch(block[:, self.process_index].tolist(), drawn, skip)
            skip += block.numel()
            newest = block[-1]
        previous = newest.view(num_processes, rows).tolist() if newest.numel() == per_round else []
        start = [part.tolist() for part in torch.split(epochs_start, size)]
        yield from self._irregular(batches_of(self.batch_sampler, stream), start, previous, skip)

    def _irregular(self, batches: Iterable[Any], start: list[Any], previous: list[Any], skip: int) -> Iterator[Stretch]:
        """Yield this rank's part of batches that may have any size.

        Args:
            batches: Batches that are left to be shared out.
            start: The epoch's first batches.
            previous: Indices that the ranks had in the round before; empty in the first.
            skip: Number of samples of the epoch that were consumed.
        """
        known: dict[tuple[int, ...], Round] = {}
        for group, kind in self._groups(batches):
            parts = self._cut(group[0]) if self.split_batches else group
            real = tuple(map(count_samples, parts))
            if kind is _Group.FULL:
                # Nearly every round is full. Full rounds share one `Round` object.
                drawn = known.get(real) or known.setdefault(real, Round(real, real, real))
            else:
                parts += [[]] * (self.num_processes - len(parts))
                real += (0,) * (self.num_processes - len(real))
                if kind is _Group.LAST and (self.drop_last or (self._stops() and not min(real))):
                    return
                drawn = self._complete(parts, real, start, previous, is_last=kind is _Group.LAST)
            yield Stretch([parts[self.process_index]], drawn, skip)
            skip += sum(real)
            previous = parts

    def check(self) -> None:
        """Raise ValueError if `uneven="error"` and it is known that ranks will have different numbers of batches."""
        num_batches = length_of(self.batch_sampler)
        if self.even_batches or self.uneven != "error" or self.drop_last or num_batches is None:
            return
        rounds, left = divmod(num_batches, self.num_processes)
        counts = [
            num_batches - self._misses_tail(rank) if self.split_batches else rounds + (rank < left)
            for rank in range(self.num_processes)
        ]
        if len(set(counts)) > 1:
            raise uneven_error(", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts)))

    @property
    def _per_round(self) -> int:
        return 1 if self.split_batches else self.num_processes

    def _groups(self, batches: Iterable[Any]) -> Iterator[tuple[list[Any], _Group]]:
        """Yield each round's batches."""
        size, per_round = self.batch_size or 0, self._per_round
        group: list[Any] = []
        for batch in batches:
            if len(group) == per_round:
                yield group, _Group.SHORT
                group = []
            group.append(batch)
            if len(group) == per_round and count_samples(batch) >= size:
                yield group, _Group.FULL
                group = []
        if group:
            yield group, _Group.LAST

    def _cut(self, batch: Any) -> list[Any]:
        assert self.batch_size is not None
        size = -(-max(self.batch_size, len(batch)) // self.num_processes)
        return [batch[rank * size : (rank + 1) * size] for rank in range(self.num_processes)]

    def _complete(
        self, parts: list[Any], real: tuple[int, ...], start: list[Any], previous: list[Any], *, is_last: bool
    ) -> Round:
        """Complete `parts` so that ranks stay in step, and return their round."""
        if self.even_batches and (is_last or self.split_batches):
            size = self.batch_size
            return fill(parts, real, start, size // self.num_processes if size and self.split_batches else size)
        if min(real):
            return Round(real, real, real)
        if is_last and self.uneven == "error":
            raise uneven_error("the last round has samples for some ranks only")
        return keep_step(parts, real, previous, leave=is_last and self.uneven == "leave")

    def _stops(self) -> bool:
        return not self.even_batches and self.uneven == "stop"

    def _misses_tail(self, rank: int) -> bool:
        """Return True if `rank` is known to get nothing of the last batch when that is split."""
        num_samples = length_of(getattr(self.batch_sampler, "sampler", None))
        if self.batch_size is None or self.drop_last or num_samples is None:
            return False
        tail = num_samples % self.batch_size
        return 0 < tail <= rank * (self.batch_size // self.num_processes)
