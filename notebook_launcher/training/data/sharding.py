"""One rank's share of a batch sampler, with the other ranks' shares of the same round.

Every rank walks through the whole batch sampler, which costs indices and no data; so each knows, round by
round, how many samples all of them have.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from notebook_launcher.training.data.position import Order, generator_owners
from notebook_launcher.training.data.rows import Round, check_split, fill, keep_step, uneven_error
from notebook_launcher.training.data.samplers import (
    IndexStream,
    SeedableRandomSampler,
    count_samples,
    indices_of,
    length_of,
    links_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


ROUNDS = 64
"""Rounds whose indices are taken at once: many, so that a batch costs little, and few enough to leave the garbage
collector alone."""


class Share(NamedTuple):
    """One rank's batch of a round."""

    indices: Any
    """The rank's indices; None: it has none, and its iteration is over."""
    round: Round
    samples: int
    """Samples of the epoch that all ranks together have had, with this round."""


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
        while count := min(ROUNDS, stream.left // per_round):
            block = stream.take(count * per_round).view(count, num_processes, rows)
            for indices in block[:, self.process_index].tolist():
                skip += per_round
                yield Share(indices, drawn, skip)
            newest = block[-1]
        previous = newest.view(num_processes, rows).tolist() if newest.numel() == per_round else []
        start = [part.tolist() for part in torch.split(epochs_start, size)]
        yield from self._irregular(batches_of(self.batch_sampler, stream), start, previous, skip)

    def _irregular(self, batches: Iterable[Any], start: list[Any], previous: list[Any], skip: int) -> Iterator[Share]:
        """Yield this rank's part of batches that may have any size.

        Args:
            batches: Batches that are left to be shared out.
            start: The epoch's first batches.
            previous: Indices that the ranks had in the round before; empty in the first.
            skip: Number of samples of the epoch that were consumed.
        """
        known: dict[tuple[int, ...], Round] = {}
        for group, is_last in self._groups(batches):
            parts = self._cut(group[0]) if self.split_batches else group
            real = tuple(map(count_samples, parts))
            if not is_last and count_samples(group[-1]) >= (self.batch_size or 0):
                # Nearly every round is full. Full rounds share one `Round` object.
                drawn = known.get(real) or known.setdefault(real, Round(real, real, real))
            else:
                parts += [[]] * (self.num_processes - len(parts))
                real += (0,) * (self.num_processes - len(real))
                if is_last and (self.drop_last or (self._stops() and not min(real))):
                    return
                drawn = self._complete(parts, real, start, previous, is_last=is_last)
            skip += sum(real)
            yield Share(parts[self.process_index], drawn, skip)
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

    def _groups(self, batches: Iterable[Any]) -> Iterator[tuple[list[Any], bool]]:
        """Yield each round's batches, and True if they are too few or the last one is short, and none follows."""
        size, per_round = self.batch_size or 0, self._per_round
        group: list[Any] = []
        for batch in batches:
            if len(group) == per_round:
                yield group, False
                group = []
            group.append(batch)
            if len(group) == per_round and count_samples(batch) >= size:
                yield group, False
                group = []
        if group:
            yield group, True

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


# --------------------------------------------------------------------------------------------------------------------
# The batches of any batch sampler, as indices with their rounds.


def shares_of(batch_sampler: Any, skip: int = 0) -> Iterator[Share]:
    """Return the shares of a batch sampler that is shared out; of any other, all its batches.

    Args:
        batch_sampler: A batch sampler; or a sampler, whose items then count one sample each.
        skip: Number of samples of the epoch that were consumed. Of a batch that they end in, the rest is yielded.
    """
    shares: Iterator[Share] = (
        batch_sampler.shares(skip) if hasattr(batch_sampler, "shares") else _unshared(batch_sampler, skip)
    )
    return shares


def stream_of(batch_sampler: Any) -> IndexStream | None:
    """Return the indices of torch's own batch sampler over a sampler of torch's own; None for others."""
    return indices_of(batch_sampler.sampler) if type(batch_sampler) is BatchSampler else None


def batches_of(batch_sampler: Any, stream: IndexStream | None = None) -> Iterator[Any]:
    """Return the batches of a batch sampler, or the rest of its stream; or the items of a sampler."""
    stream = stream_of(batch_sampler) if stream is None else stream
    if stream is not None:
        return _cut(stream, batch_sampler.batch_size, drop_last=batch_sampler.drop_last)
    indices = indices_of(batch_sampler)
    return iter(batch_sampler) if indices is None else _items(indices)


def _cut(stream: IndexStream, size: int, *, drop_last: bool) -> Iterator[list[int]]:
    while count := min(ROUNDS, stream.left // size):
        yield from stream.take(count * size).view(count, size).tolist()
    # Not sooner: what draws the indices may count the epoch on where they end.
    if len(rest := stream.take(size)) and not drop_last:
        yield rest.tolist()


def _items(stream: IndexStream) -> Iterator[int]:
    while len(indices := stream.take(ROUNDS)):
        yield from indices.tolist()


def _unshared(batch_sampler: Any, skip: int) -> Iterator[Share]:
    known: dict[int, Round] = {}
    _, batches = split_at(batches_of(batch_sampler), skip)
    for batch in batches:
        count = count_samples(batch)
        skip += count
        yield Share(batch, known.get(count) or known.setdefault(count, Round((count,), (count,), (count,))), skip)


def split_at(batches: Iterator[Any], skip: int, keep: int = 0) -> tuple[list[Any], Iterator[Any]]:
    """Skip the first `skip` samples; return the last `keep` batches of them, and the batches that are left."""
    skipped: collections.deque[Any] = collections.deque(maxlen=keep)
    for batch in batches:
        count = count_samples(batch)
        if not 0 < count <= skip:
            return list(skipped), itertools.chain((batch[skip:] if skip else batch,), batches)
        skip -= count
        skipped.append(batch)
    return list(skipped), iter(())


# --------------------------------------------------------------------------------------------------------------------
# A batch sampler without its first batches.


class SkipBatchSampler(BatchSampler):
    """A batch sampler that skips the first `skip_batches` batches of another sampler in every iteration."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def total_length(self) -> int:
        """Number of the other sampler's batches."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    def shares(self, skip: int = 0) -> Iterator[Share]:
        """Yield the remaining batches, with their rounds.

        Args:
            skip: Number of samples of the epoch that were consumed; if any, the first batches are among them.
        """
        return itertools.islice(shares_of(self.batch_sampler, skip), 0 if skip else self.skip_batches, None)


# --------------------------------------------------------------------------------------------------------------------
# A batch sampler that remembers the round of each batch, for the loader that fetches with it.
#
# torch takes indices in the main process, with and without workers, sooner than it hands out the batches that are
# loaded for them, and in the same order. So the rounds wait here for their batches.


DRAW_NOTHING = (range, SequentialSampler, DistributedSampler, SeedableRandomSampler, BatchSampler, BatchSamplerShard,
                SkipBatchSampler)  # fmt: skip
"""Samplers whose order depends on no generator, or on a seed that they hold."""
DRAW_FROM_THEIR_OWN = (RandomSampler, WeightedRandomSampler)
"""Samplers that draw from their `generator`, if they have one."""


class Walk:
    """One walk through a batch sampler, a batch ahead of the loader, so that the last batch is known as such."""

    def __init__(self, batch_sampler: Any, skip: int, order: Order | None) -> None:
        self.order = order
        """The states that made the order; None until the first batch is drawn."""
        self.taken: collections.deque[tuple[Share, bool]] = collections.deque()
        """Batches whose indices torch has taken and that it has not handed out yet, the oldest first, and True for the
        last batch."""
        self._batch_sampler = batch_sampler
        self._skip = skip

    def indices(self) -> Iterator[Any]:
        """Yield what the loader fetches, and note it in `taken`."""
        shares = shares_of(self._batch_sampler, self._skip)
        ahead = self._start(shares)
        while ahead is not None:
            share, ahead = ahead, _following(shares)
            self.taken.append((share, ahead is None))
            yield share.indices

    def _start(self, shares: Iterator[Share]) -> Share | None:
        links = links_of(self._batch_sampler)
        owners = generator_owners(links)
        if self.order is not None:
            with self.order.replayed(owners):
                return _following(shares)
        self.order = Order.capture(owners, with_defaults=draws_from_defaults(links))
        return _following(shares)


def draws_from_defaults(links: Iterable[Any]) -> bool:
    """Return False if these samplers are known to draw nothing from the default generators.

    Reading the states of the default generators takes 60 to 100 µs at each epoch.
    """
    return any(
        type(link) not in DRAW_NOTHING
        and not (type(link) in DRAW_FROM_THEIR_OWN and getattr(link, "generator", None) is not None)
        for link in links
    )


def _following(shares: Iterator[Share]) -> Share | None:
    ahead = next(shares, None)
    # A rank without indices is at its end; the other ranks have one batch more.
    return None if ahead is None or ahead.indices is None else ahead


class WalkedSampler:
    """The batch sampler of the fetching loader: every iteration is a new `Walk`."""

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self._skip = 0
        """Samples of the next walk that are skipped."""
        self._order: Order | None = None
        """The states that make the order of the next walk; None: a new order."""
        self._newest: Walk | None = None
        """The walk of the iteration that began last, until it is taken."""

    def begin_at(self, skip: int, order: Order | None) -> None:
        """Skip the first `skip` samples of the order that `order` makes, from now on."""
        self._skip = skip
        self._order = order

    def take_walk(self) -> Walk:
        """Return the walk of the iteration that has just begun."""
        walk, self._newest = self._newest, None
        assert walk is not None
        return walk

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks twice, and uses the second.
        self._newest = Walk(self._batch_sampler, self._skip, self._order)
        return self._newest.indices()

    def __len__(self) -> int:
        return len(self._batch_sampler)
