"""One rank's share of a batch sampler, and what the other ranks get in the same round.

Every rank walks through the whole batch sampler, which costs indices and no data; so each knows, round by
round, how many samples all of them have.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler

from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.data.samplers import count_samples, length_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["BatchSamplerShard", "Share", "shares_of"]


class Share(NamedTuple):
    """One rank's batch of a round."""

    indices: Any
    """None: it has none, and its iteration is over."""
    round: Round
    samples: int
    """How many samples of the epoch all ranks have had with this round."""


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
        batch_sampler: What is shared out.
        batch_size: Its `batch_size`; None if it has none.
        drop_last: Its `drop_last`; False if it has none.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,  # noqa: FBT001, FBT002 - Accelerate's signature
        even_batches: bool = True,  # noqa: FBT001, FBT002
        *,
        uneven: str = "leave",
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.uneven = uneven
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if split_batches and (self.batch_size is None or self.batch_size % num_processes != 0):
            raise ValueError(
                f"split_batches needs batches that can be cut in {num_processes}, and this batch size is "
                f"{self.batch_size}. It must be a round multiple of the number of processes."
            )

    @property
    def total_length(self) -> int:
        """Batches of all ranks."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        num_batches = len(self.batch_sampler)
        if self.split_batches:
            return num_batches - (self._stops() and self._has_small_tail())
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
            skip: How many samples of the epoch have been had; the rest is shared out. A batch of which only a
                part is left comes as that part.

        Raises:
            ValueError: With `uneven="error"`, at a round that has less than a batch for every rank.
        """
        start: list[Any] = []
        known: dict[tuple[int, ...], Round] = {}
        previous: list[Any] = []
        for group, is_last in self._groups(_rest(self._recorded(start), skip)):
            parts, real = self._cut(group)
            if min(real) and not (is_last or self._is_short(group)):
                # Nearly all rounds: every rank has a batch, and equal rounds share one object.
                drawn = known.get(real) or known.setdefault(real, Round(real, real, real))
            else:
                if is_last and self._leaves_out(real):
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
        ranks = range(self.num_processes)
        if self.split_batches:
            counts = [num_batches - (self._tail() > 0 and not self._in_tail(rank)) for rank in ranks]
        else:
            counts = [num_batches // self.num_processes + (rank < num_batches % self.num_processes) for rank in ranks]
        if len(set(counts)) > 1:
            raise ValueError(self._uneven_message(", ".join(f"rank {rank} {n}" for rank, n in enumerate(counts))))

    def _recorded(self, start: list[Any]) -> Iterator[Any]:
        """Keep the first round's batches in `start`: the last round is filled from them."""
        for batch in self.batch_sampler:
            if len(start) < self._per_round:
                start.append(batch)
            yield batch

    def _groups(self, batches: Iterable[Any]) -> Iterator[tuple[list[Any], bool]]:
        """Yield each round's batches, and whether it is known to be the last that must be completed."""
        group: list[Any] = []
        for batch in batches:
            if len(group) == self._per_round:
                yield group, False
                group = []
            group.append(batch)
            if len(group) == self._per_round and not self._is_short(group):
                yield group, False
                group = []
        if group:
            yield group, True

    def _is_short(self, group: list[Any]) -> bool:
        return self.batch_size is not None and count_samples(group[-1]) < self.batch_size

    @property
    def _per_round(self) -> int:
        return 1 if self.split_batches else self.num_processes

    def _cut(self, group: list[Any]) -> tuple[list[Any], tuple[int, ...]]:
        """Return every rank's part, and how many samples are in it."""
        parts = group
        if self.split_batches:
            assert self.batch_size is not None
            size = -(-max(self.batch_size, len(group[0])) // self.num_processes)
            parts = [group[0][rank * size : (rank + 1) * size] for rank in range(self.num_processes)]
        missing = self.num_processes - len(parts)
        return parts + [[]] * missing, (*map(count_samples, parts), *[0] * missing)

    def _complete(
        self, parts: list[Any], real: tuple[int, ...], start: list[Any], previous: list[Any], *, is_last: bool
    ) -> Round:
        """Change `parts` so that ranks stay in step, and return their round."""
        weights = None
        if self.even_batches and (is_last or self.split_batches):
            self._fill(parts, start)
        elif not min(real):
            if is_last and self.uneven == "error":
                raise ValueError(self._uneven_message("in the last round, samples are left for some ranks only"))
            leave = is_last and self.uneven == "leave"
            anything = next(part for part, count in zip(parts, real, strict=True) if count)
            for rank, count in enumerate(real):
                if not count:
                    parts[rank] = None if leave else previous[rank] if previous else anything
            weights = real
        rows = tuple(0 if part is None else count_samples(part) for part in parts)
        if weights is None:
            weights = rows
        return Round(rows, real, weights)

    def _fill(self, parts: list[Any], start: list[Any]) -> None:
        if self.batch_size is None:
            whole = itertools.cycle(start)
            for rank, part in enumerate(parts):
                if not count_samples(part):
                    parts[rank] = next(whole)
            return
        size = self.batch_size // (self.num_processes if self.split_batches else 1)
        samples = itertools.cycle(itertools.chain.from_iterable(start))
        for rank, part in enumerate(parts):
            if len(part) < size:
                parts[rank] = [*part, *itertools.islice(samples, size - len(part))]

    def _leaves_out(self, real: tuple[int, ...]) -> bool:
        return self.drop_last or (self._stops() and not min(real))

    def _stops(self) -> bool:
        return not self.even_batches and self.uneven == "stop"

    def _has_small_tail(self) -> bool:
        """Whether the last batch is known to be too small to be split among all ranks."""
        return self._tail() > 0 and not self._in_tail(self.num_processes - 1)

    def _in_tail(self, rank: int) -> bool:
        assert self.batch_size is not None
        return self._tail() > rank * (self.batch_size // self.num_processes)

    def _tail(self) -> int:
        num_samples = length_of(getattr(self.batch_sampler, "sampler", None))
        if self.batch_size is None or self.drop_last or num_samples is None:
            return 0
        return num_samples % self.batch_size

    def _uneven_message(self, what: str) -> str:
        return (
            f"The ranks would have different numbers of batches ({what}), with even_batches=False and "
            'uneven="error". Write uneven="weigh" to use all samples, each once; uneven="stop" or drop_last=True '
            "to leave the last out; or even_batches=True to repeat some."
        )


def shares_of(batch_sampler: Any, skip: int = 0) -> Iterator[Share]:
    """Yield the shares of a sharded batch sampler; all batches of one that is not."""
    if hasattr(batch_sampler, "shares"):
        yield from batch_sampler.shares(skip)
        return
    known: dict[int, Round] = {}
    for batch in _rest(batch_sampler, skip):
        count = count_samples(batch)
        skip += count
        yield Share(batch, known.get(count) or known.setdefault(count, Round((count,), (count,), (count,))), skip)


def _rest(batches: Iterable[Any], skip: int) -> Iterator[Any]:
    """Leave out the first `skip` samples."""
    for batch in batches:
        count = count_samples(batch)
        if 0 < count <= skip:
            skip -= count
            continue
        yield batch[skip:] if skip else batch
        skip = 0
