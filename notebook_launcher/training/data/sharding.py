"""One rank's share of a batch sampler, with the other ranks' shares of the same round.

Every rank walks through the whole batch sampler, which costs indices and no data; so each knows, round by
round, how many samples all of them have.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler

from notebook_launcher.training.data.position import Order, generator_owners
from notebook_launcher.training.data.rows import Round, check_split, uneven_error
from notebook_launcher.training.data.samplers import count_samples, indices_of, length_of, links_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


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
        """The batches of all ranks with which the last iteration began, as this rank drew them."""
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
        batches = batches_of(self.batch_sampler)
        self.first_round = list(itertools.islice(batches, self._per_round))
        before, batches = split_at(itertools.chain(self.first_round, batches), skip, self._per_round)
        previous: list[Any] = []
        if len(before) == self._per_round:
            # At the end of the epoch, some ranks may get their batch of the round before again.
            previous = self._cut(before[0]) if self.split_batches else before
        yield from self.deal(batches, self.first_round, previous, skip)

    def deal(
        self,
        batches: Iterable[Any],
        start: list[Any],
        previous: list[Any] | None,
        skip: int,
        count: Callable[[Any], int] = count_samples,
    ) -> Iterator[Share]:
        """Yield this rank's part of batches that may have any size.

        Args:
            batches: Batches that are left to be shared out, after `skip` samples of the epoch.
            start: The epoch's first batches.
            previous: What the ranks had in the round before; empty in the first. None: it is not known.
            skip: See `batches`.
            count: Returns the number of samples of a batch.
        """
        known: dict[tuple[int, ...], Round] = {}
        for group, is_last in self._groups(batches):
            parts = self._cut(group[0]) if self.split_batches else group
            real = tuple(map(count, parts))
            if not is_last and count_samples(group[-1]) >= (self.batch_size or 0):
                # Nearly every round is full. Full rounds share one `Round` object.
                drawn = known.get(real) or known.setdefault(real, Round(real, real, real))
            else:
                parts += [[]] * (self.num_processes - len(parts))
                real += (0,) * (self.num_processes - len(real))
                if is_last and (self.drop_last or (self._stops() and not min(real))):
                    return
                counts = self._complete(parts, real, start, previous, is_last=is_last)
                rows = tuple(0 if part is None else count(part) for part in parts)
                drawn = Round(rows, real, rows if counts else real)
            skip += sum(real)
            yield Share(parts[self.process_index], drawn, skip)
            previous = None if previous is None else parts

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
        self, parts: list[Any], real: tuple[int, ...], start: list[Any], previous: list[Any] | None, *, is_last: bool
    ) -> bool:
        """Complete the parts of a short round, in place, so that ranks stay in step.

        Returns:
            True if what is added counts in a mean.
        """
        if self.even_batches and (is_last or self.split_batches):
            size = self.batch_size
            if size is None:
                whole = itertools.cycle(start)
                parts[:] = [part if count else next(whole) for part, count in zip(parts, real, strict=True)]
                return True
            size = size // self.num_processes if self.split_batches else size
            samples = itertools.cycle(itertools.chain.from_iterable(start))
            for rank, count in enumerate(real):
                parts[rank] = [*parts[rank], *itertools.islice(samples, max(0, size - count))]
            return True
        if is_last and self.uneven == "error" and not min(real):
            raise uneven_error("the last round has samples for some ranks only")
        leaves = is_last and self.uneven == "leave"
        another = next((part for part, count in zip(parts, real, strict=True) if count), None)
        for rank, count in enumerate(real):
            if not count:
                parts[rank] = None if leaves else previous[rank] if previous else another
        return False

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
    """Yield the shares of a batch sampler that is shared out; of any other, or a sampler, all its batches or items.

    Of a batch in which the `skip` samples end that were consumed, the rest is yielded.
    """
    if hasattr(batch_sampler, "shares"):
        yield from batch_sampler.shares(skip)
        return
    known: dict[int, Round] = {}
    _, batches = split_at(batches_of(batch_sampler), skip)
    for batch in batches:
        count = count_samples(batch)
        skip += count
        yield Share(batch, known.get(count) or known.setdefault(count, Round((count,), (count,), (count,))), skip)


def batches_of(batch_sampler: Any) -> Iterator[Any]:
    """Return the batches of a batch sampler, or the items of a sampler."""
    if type(batch_sampler) is BatchSampler:
        return iter(BatchSampler(indices_of(batch_sampler.sampler), batch_sampler.batch_size, batch_sampler.drop_last))
    return indices_of(batch_sampler)


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


class Walk:
    """One walk through a batch sampler, a batch ahead of the loader, so that the last batch is known as such.

    Args:
        batch_sampler: Source of the batches.
        skip: Number of samples that are skipped.
        order: The states that make the order; None: a new order.
    """

    def __init__(self, batch_sampler: Any, skip: int, order: Order | None) -> None:
        self.order = order
        """The states that made the order; None until the first batch is drawn."""
        self.taken: collections.deque[tuple[Share, bool]] = collections.deque()
        """Batches whose indices torch has taken and that it has not handed out yet, the oldest first, and True for the
        last batch."""
        self._batch_sampler = batch_sampler
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        """Yield what the loader fetches, and note it in `taken`."""
        shares = shares_of(self._batch_sampler, self._skip)
        owners = generator_owners(links_of(self._batch_sampler))
        if self.order is None:
            self.order = Order.capture(owners)
            ahead = _following(shares)
        else:
            with self.order.replayed(owners):
                ahead = _following(shares)
        while ahead is not None:
            share, ahead = ahead, _following(shares)
            self.taken.append((share, ahead is None))
            yield share.indices


def _following(shares: Iterator[Share]) -> Share | None:
    ahead = next(shares, None)
    # A rank without indices is at its end; the other ranks have one batch more.
    return None if ahead is None or ahead.indices is None else ahead


class WalkedSampler:
    """The batch sampler of the fetching loader: an iteration is `walk`, which its loop puts here, or else a new one."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.walk: Walk | None = None

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks twice, and uses the second.
        return iter(self.walk or Walk(self.batch_sampler, 0, None))

    def __len__(self) -> int:
        return len(self.batch_sampler)
