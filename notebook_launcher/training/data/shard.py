"""The loader of a rank that reads its own share."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler

from notebook_launcher.training.data import iterables
from notebook_launcher.training.data.iterables import IterableDatasetShard, OwnShards, Receipt, StreamWithReceipts
from notebook_launcher.training.data.loader import Delivery, PreparedLoader, data_arguments, look_ahead
from notebook_launcher.training.data.position import Order, Position
from notebook_launcher.training.data.samplers import SeedableRandomSampler, length_of, sampler_chain
from notebook_launcher.training.data.sharding import BatchSamplerShard
from notebook_launcher.training.operations.checking import gather_digest, gather_numbers
from notebook_launcher.training.operations.collectives import world_size
from notebook_launcher.training.process.arrivals import meet
from notebook_launcher.training.random import synchronize_rng_states
from notebook_launcher.training.user_warnings import notify_or_warn
from notebook_launcher.wording import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


T = TypeVar("T")
_SHARDS = (BatchSamplerShard, IterableDatasetShard)


class DataLoaderShard(PreparedLoader):
    """A `DataLoader` that yields one rank's batches.

    A `BatchSamplerShard`, an `IterableDatasetShard` or an `OwnShards` decides which samples are the rank's share;
    without one, the share is everything.

    Args:
        dataset: As `DataLoader`'s.
        device: See `PreparedLoader`, as for all that is not here.
        rng_types: Generators that every rank takes from rank 0 before each epoch (`synchronize_rng_states`).
        synchronized_generator: The generator that `"generator"` means.
        check_ranks: True if ranks compare their epoch plans before each epoch. If so, all of them must begin each
            loop.
    """

    OWN = ("rng_types", "synchronized_generator", "check_ranks")

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        *,
        check_ranks: bool = True,
        **kwargs: Any,
    ) -> None:
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.check_ranks = check_ranks
        self._has_told_of_orders = False
        """True once the user was told that ranks draw different orders."""
        self._stream: StreamWithReceipts | None = None
        """The iterable data set as `base_dataloader` reads it; None for a map-style data set."""
        super().__init__(
            dataset,
            device=device,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            **kwargs,
        )
        cuts = [link for link in (dataset, *sampler_chain(self)) if isinstance(link, _SHARDS)]
        self.shard: BatchSamplerShard | IterableDatasetShard | None = cuts[0] if cuts else None
        """The object that cuts this rank's share out; None: the rank has everything."""
        self.num_processes, self._place, self.split_batches = 1, 0, False
        if cuts:
            self.num_processes, self._place = cuts[0].num_processes, cuts[0].process_index
            self.split_batches = cuts[0].split_batches
        self._reads_for_all = isinstance(dataset, IterableDatasetShard) and not isinstance(dataset, OwnShards)
        self.base_dataloader = self._make_base()

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole data set; a TypeError is raised if it has no length."""
        if isinstance(self.dataset, IterableDatasetShard):
            return len(self.dataset.dataset)
        return super().total_dataset_length

    def _nominal_batch_size(self) -> int | None:
        shard = self.shard
        return shard.batch_size if isinstance(shard, IterableDatasetShard) else super()._nominal_batch_size()

    def _prepare_epoch(self, start: Position) -> None:
        shard = self.shard
        if self.check_ranks and shard is not None and 1 < shard.num_processes == world_size():
            sampler = self.get_sampler()
            seedable = sampler if isinstance(sampler, SeedableRandomSampler) else None
            num_samples = num_batches = None
            if isinstance(shard, BatchSamplerShard):
                num_samples, num_batches = length_of(self.dataset), length_of(shard.batch_sampler)
            elif not isinstance(shard, OwnShards):
                num_samples = length_of(shard.dataset)
            rows = rows_of(self.dataset, sampler)
            plan = (num_samples, num_batches, start.epoch, start.samples, self.skip_batches, rows)
            seed = agree_on_plan(plan, 0 if seedable is None else seedable.initial_seed)
            if seedable is not None:
                seedable.initial_seed = seed
            if not isinstance(shard, OwnShards):
                self._compare_once(shard.dataset if isinstance(shard, IterableDatasetShard) else self.dataset)
        if isinstance(shard, BatchSamplerShard) or (shard is not None and self.num_workers <= 1):
            # If workers cut a stream, its length does not show where their parts end.
            shard.check()
        types = [str(getattr(kind, "value", kind)) for kind in self.rng_types or ()]
        if self.synchronized_generator is None:
            types = [kind for kind in types if kind != "generator"]
        synchronize_rng_states(types, self.synchronized_generator)

    def _make_stream(self, arguments: dict[str, Any]) -> DataLoader[Any]:
        shard = self.shard
        if not isinstance(shard, IterableDatasetShard):
            shard = IterableDatasetShard(
                self.dataset, self.batch_size, self.drop_last, even_batches=False, uneven="weigh"
            )
        self._stream = StreamWithReceipts(shard, self.num_workers, persistent=self.persistent_workers)
        arguments["collate_fn"] = iterables.CollateWithReceipt(self.collate_fn, batched=self.batch_size is not None)
        arguments["worker_init_fn"] = iterables.StartWorker(self.worker_init_fn, reads_for_all=self._reads_for_all)
        return DataLoader(self._stream, **data_arguments(self, None), **arguments)

    def _deliveries(self, start: Position, order: Order | None) -> Iterator[Delivery]:
        if self._stream is None:
            walked, shard = self._walk(start, order), self.shard
            if not self._may_differ():
                return walked
            assert isinstance(shard, BatchSamplerShard)
            return self._compared(walked, lambda _: repr(shard.first_round), "the sampler draws another order")
        read = self._read_in_step if isinstance(self._stream.shard, OwnShards) else self._read
        return read(self._stream, start, order)

    def _may_differ(self) -> bool:
        """Return True if each rank walks through all of the data, and takes its share."""
        return self.check_ranks and not isinstance(self.shard, OwnShards) and 1 < self.num_processes == world_size()

    def _compared(
        self, items: Iterator[T], text: Callable[[T | None], str], what: str, *, unless: bool = False
    ) -> Iterator[T]:
        """Yield what a loop draws, after a comparison of how the ranks' walks through the data begin, as texts."""
        first = next(items, None)
        by_rank = gather_digest(text(first))
        others = [rank for rank, number in enumerate(by_rank) if number != by_rank[0]]
        if others and not self._has_told_of_orders:
            self._has_told_of_orders = True
            notify_or_warn(
                f"{what} on {rank_list(others)} than on rank 0. Each rank walks through the whole order and takes its "
                "share, so some samples are read by several ranks and others by none, in training as in evaluation"
                f"{', unless only random changes of samples differ' * unless}. Draw the order from a generator that "
                "has the same seed on every rank, such as numpy.random.default_rng(epoch), and split nothing by rank; "
                "or pass dispatch_batches=True, so that rank 0 reads for all."
            )
        if first is not None:
            yield first
            yield from items

    def _read(self, stream: StreamWithReceipts, start: Position, order: Order | None) -> Iterator[Delivery]:
        """Yield the batches of an iterable data set that every rank reads as a whole."""
        consumed = self._consumed_streams(start)
        fetched = self._fetch(stream, start.epoch, [start.stream, *consumed], order)
        skip = 0 if start else self.skip_batches
        ahead = look_ahead(fetched)
        if self._may_differ():
            ahead = self._compared(
                ahead,
                lambda first: "" if first is None else first[0][1].digest,
                "the stream gives other samples",
                unless=True,
            )
        for (batch, receipt), is_last in ahead:
            consumed[receipt.stream] = receipt.consumed
            if skip:
                skip -= 1
                continue
            position = Position(start.epoch, sum(consumed), tuple(consumed), receipt.stream)
            yield Delivery(batch, receipt.round, is_last, position)

    def _read_in_step(self, stream: StreamWithReceipts, start: Position, order: Order | None) -> Iterator[Delivery]:
        """Yield the batches of an iterable data set whose shards are shared out: every rank reads its own."""
        shard = stream.shard
        assert isinstance(shard, OwnShards)
        ranks, width = shard.num_processes, 1 + max(1, self.num_workers)
        numbers = start.streams or (0,) * (ranks * width)
        if start and (start.stream != iterables.OWN_SHARDS or len(numbers) != ranks * width):
            raise iterables.wrong_readers(len(numbers), f"{ranks} ranks read shards with {width - 1} streams each")
        # By rank: the stream of its last batch, and the samples that it has consumed of each of its streams.
        readings = [list(numbers[rank * width : (rank + 1) * width]) for rank in range(ranks)]
        fetched = self._fetch(stream, start.epoch, list(readings[shard.process_index]), order)
        skip = 0 if start else self.skip_batches
        for number, (batch, counts, is_last, reports) in enumerate(iterables.in_step(fetched, shard)):
            for reading, report in zip(readings, reports, strict=True):
                if report.rows:
                    reading[0], reading[1 + report.stream] = report.stream, report.consumed
            if number >= skip:
                self.remainder = sum(counts.real) if is_last else -1
                samples = sum(sum(reading[1:]) for reading in readings)
                position = Position(start.epoch, samples, tuple(itertools.chain(*readings)), iterables.OWN_SHARDS)
                yield Delivery(batch, counts, is_last, position)

    def _fetch(
        self, stream: StreamWithReceipts, epoch: int, reading: list[int], order: Order | None
    ) -> Iterator[tuple[Any, Receipt]]:
        """Yield this rank's batches from the position `reading` on: the stream read last, and the samples of each."""
        last_stream, *consumed = reading
        stream.order(epoch, last_stream, consumed)
        with self._opened_stream(order) as fetched:
            if any(consumed) and not self.num_workers:
                # Dropped: asking for this batch makes the data set read the consumed samples.
                next(fetched, None)
        yield from (pair for pair in fetched if pair[1] is not None)

    def _consumed_streams(self, start: Position) -> list[int]:
        num_streams = max(1, self.num_workers)
        if not start:
            return [0] * num_streams
        streams = start.streams or (start.samples,)
        if start.stream == iterables.OWN_SHARDS:
            raise iterables.wrong_readers(
                len(start.streams), "every rank, or rank 0 alone, reads the data set as a whole"
            )
        if len(streams) != num_streams:
            raise ValueError(
                f"This position was saved where {len(streams)} streams of an iterable data set were read, and with "
                f"num_workers={self.num_workers} there are {num_streams}: each worker reads its own. Set "
                f"num_workers={len(streams)} until the end of the epoch, or restart it with set_epoch()."
            )
        return list(streams)


# --------------------------------------------------------------------------------------------------------------------
# Epoch plans, which ranks compare before an epoch, so that they fail at once and not in step 12.


UNKNOWN = -1


def agree_on_plan(plan: Sequence[int | None], seed: int) -> int:
    """Compare the ranks' plans, and return rank 0's seed of the order; every rank must call this.

    Args:
        plan: Numbers that `EXPLANATIONS` explain, one after the other; None where one is unknown.
        seed: This rank's seed.

    Raises:
        RuntimeError: On every rank, if the plans differ.
    """
    meet("iter(loader)")
    # A seed may have 64 bits without a sign.
    numbers = [*(UNKNOWN if number is None else number for number in plan), seed % 2**64 - 2**63]
    by_rank = gather_numbers(numbers)
    first = by_rank[0]
    for rank, theirs in enumerate(by_rank):
        for at, explanation in enumerate(EXPLANATIONS):
            if theirs[at] != first[at]:
                mine, its = (
                    "an unknown number of" if number == UNKNOWN else number for number in (theirs[at], first[at])
                )
                raise RuntimeError(explanation.format(rank=rank, mine=mine, first=its))
    return first[-1] + 2**63


EXPLANATIONS = (
    (  # samples of the data set
        "rank {rank}'s data set has {mine} samples, rank 0's {first}: the ranks would see different data and wait "
        "for each other at the end. Give every rank the same data set; prepare() shares it out."
    ),
    (  # batches of all ranks
        "rank {rank}'s loader has {mine} batches, rank 0's {first}: the ranks would wait for each other at the end. "
        "Give every rank a loader of the same batch_size and drop_last."
    ),
    (
        "rank {rank} begins epoch {mine}, rank 0 epoch {first}: the ranks would see different orders. Call "
        "set_epoch(), and leave loops early, on every rank or on none."
    ),
    "rank {rank} begins at sample {mine} of the epoch, rank 0 at {first}: load the same state on every rank.",
    (
        "rank {rank} skips its first {mine} batches, rank 0 {first}: call skip_first_batches() with the same number "
        "on every rank."
    ),
    (  # `rows_of` the data set
        "rank {rank}'s subset of the data has other rows than rank 0's: rows that one rank holds back for validation "
        "would be trained on by another. Ranks draw random numbers of their own from prepare() on. Split the data "
        "before it, or with a generator: random_split(..., generator=torch.Generator().manual_seed(0))."
    ),
)


def rows_of(dataset: Any, sampler: Any = None) -> int:
    """Return a fingerprint of the rows that a `Subset` or a `SubsetRandomSampler` takes; 0 without either."""
    total = 0
    takers: list[Any] = [sampler] if isinstance(sampler, SubsetRandomSampler) else []
    while isinstance(dataset, Subset):
        takers.append(dataset)
        dataset = dataset.dataset
    for taker in takers:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # A user's own kind of indices.
            rows = torch.as_tensor(taker.indices, dtype=torch.int64, device="cpu").flatten()
            # The sum may run over; what is left of it still depends on each row and its place.
            total += int((rows * torch.arange(1, len(rows) + 1, device="cpu")).sum())
    return total % 2**63
