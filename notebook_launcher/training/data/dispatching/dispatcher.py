"""The loader of ranks that get their batches from rank 0."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher.training.data.completing import uneven_error
from notebook_launcher.training.data.dispatching import wire
from notebook_launcher.training.data.dispatching.counted import CountedBatch, CountingCollate, counted
from notebook_launcher.training.data.dispatching.portions import Portions
from notebook_launcher.training.data.iterables.own_shards import OnlyRankInWorker, open_as_only_rank
from notebook_launcher.training.data.loaders.loader import PreparedLoader
from notebook_launcher.training.data.loaders.loader_arguments import data_arguments
from notebook_launcher.training.data.loaders.loader_settings import LoaderSettings
from notebook_launcher.training.data.loaders.lookahead import look_ahead
from notebook_launcher.training.data.loaders.transfer import Delivery, without_label
from notebook_launcher.training.data.position import LoaderProgress, Order, Position, generator_owners
from notebook_launcher.training.data.sampling.samplers import length_of, sampler_chain
from notebook_launcher.training.data.sampling.walking import WalkedSampler
from notebook_launcher.training.operations.collectives import world_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from notebook_launcher.training.data.active_loaders import ActiveLoaders
    from notebook_launcher.training.data.rounds import Round

__all__ = ["DataLoaderDispatcher"]

NOTHING: Any = ([], None, 0), True
"""A round of a data set without data."""


class DataLoaderDispatcher(PreparedLoader):
    """A `DataLoader` that rank 0 iterates, dealing out its batches to all ranks.

    Only rank 0 touches the data set. Structure and types of batches are kept; what is not a tensor travels by
    pickle. An exception in the data set is raised on every rank.

    Args:
        dataset: As `DataLoader`'s.
        split_batches: True if every batch is cut among the ranks; False: each rank gets whole ones.
        skip_batches: Number of rounds that are left out at the start of each epoch.
        use_stateful_dataloader: Accepted; these loaders always know their position.
        slice_fn: See `Portions.slice_fn`.
        iteration: The first epoch's number.
        device: Device that batches are moved to; None: they are not moved.
        num_processes: Number of ranks that share the data; None: all.
        even_batches: See `Portions`.
        uneven: See `Portions`; `"leave"` is as `even_batches`, since Accelerate always evens out here.
        stack: Loaders that are being iterated; the loader is among them while it is iterated.
        progress: Progress of the loader whose rest this loader reads; None: a new one.
        kwargs: As `DataLoader`'s.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        iteration: int = 0,
        *,
        device: torch.device | str | int | None = None,
        num_processes: int | None = None,
        even_batches: bool = True,
        uneven: str = "leave",
        stack: ActiveLoaders | None = None,
        progress: LoaderProgress | None = None,
        **kwargs: Any,
    ) -> None:
        self.slice_fn = slice_fn
        self.even_batches = even_batches
        self.uneven = uneven
        self.use_stateful_dataloader = use_stateful_dataloader
        self._split_batches = split_batches
        self._has_drawn_seed = False
        """True once this rank, which does not read, has drawn the seed of rank 0's workers."""
        self._num_processes = world_size() if num_processes is None else num_processes
        super().__init__(
            dataset,
            LoaderSettings(
                device=device,
                skip_batches=skip_batches,
                drop_last=_drop_last,
                non_blocking=_non_blocking,
                iteration=iteration,
                active_loaders=stack,
                progress=progress,
            ),
            **kwargs,
        )

    @property
    def num_processes(self) -> int:
        """Number of ranks that the data are shared out among."""
        return self._num_processes

    @property
    def _place(self) -> int:
        return 0 if self.num_processes == 1 else torch.distributed.get_rank()

    @property
    def split_batches(self) -> bool:
        """True if every batch is cut among the ranks."""
        return self._split_batches

    def _fetching(self) -> dict[str, Any]:
        arguments = super()._fetching()
        is_ready = self.batch_sampler is None and self.batch_size is None
        arguments["collate_fn"] = CountingCollate.around(self.collate_fn, is_ready=is_ready)
        if self._reads_for_all and self.num_workers:
            arguments["worker_init_fn"] = OnlyRankInWorker(self.worker_init_fn)
        return arguments

    @property
    def _reads_for_all(self) -> bool:
        """True if rank 0 reads a stream for other ranks, too."""
        return self.num_processes > 1 and isinstance(self.dataset, IterableDataset)

    def _portions(self) -> Portions:
        return Portions(
            num_processes=self.num_processes,
            split=self.split_batches,
            even=self.even_batches or self.uneven == "leave",
            uneven=self.uneven,
            drop_last=self._drop_last,
            slice_fn=self.slice_fn,
        )

    @property
    def _fetched_per_round(self) -> int:
        return 1 if self.split_batches else self.num_processes

    def __len__(self) -> int:
        num_batches = len(self.base_dataloader)
        if self._walked is None:
            num_batches = max(0, num_batches - self.skip_batches * self._fetched_per_round)
        if self.even_batches or self.uneven != "stop":
            return (
                num_batches // self._fetched_per_round
                if self._drop_last
                else -(-num_batches // self._fetched_per_round)
            )
        return num_batches // self._fetched_per_round - self._has_small_tail()

    def _check(self) -> None:
        """Raise ValueError if `uneven="error"` and it is known that the last round is not for all ranks."""
        num_batches = length_of(self.base_dataloader)
        if self.even_batches or self.uneven != "error" or self._drop_last or num_batches is None:
            return
        if num_batches % self._fetched_per_round or self._has_small_tail():
            raise uneven_error(f"{num_batches} batches, {self._fetched_per_round} for each round")

    def _has_small_tail(self) -> bool:
        """Return True if the last batch is known to be too small to be split among all ranks."""
        num_samples = length_of(self.dataset if self._walked is None else self.get_sampler())
        size = self._nominal_batch_size()
        if not self.split_batches or self._drop_last or num_samples is None or size is None:
            return False
        return 0 < num_samples % size < self.num_processes

    def _prepare_epoch(self, start: Position) -> None:  # noqa: ARG002 - the base's signature
        if self.num_processes not in (1, world_size()):
            raise RuntimeError(
                f"This loader deals out to {self.num_processes} ranks, and the process group has {world_size()}. "
                "Create it inside the ranks, or pass dispatch_batches=False."
            )

    def _deliveries(self, start: Position, order: Order | None) -> Iterator[Delivery]:
        where = torch.device("cpu" if self.device is None else self.device)
        if self.num_processes == 1:
            deliveries = self._lead(start, order, None)
        elif torch.distributed.get_rank() == 0:
            deliveries = self._lead(start, order, where)
        else:
            deliveries = self._follow(start, where)
        for delivery in deliveries:
            if delivery.is_last and delivery.round is not None:
                self.remainder = sum(delivery.round.real)
            yield delivery

    def _lead(self, start: Position, order: Order | None, where: torch.device | None) -> Iterator[Delivery]:
        """Read the data, send the other ranks their parts, and yield rank 0's own. `where` is None for a lone rank."""
        rounds = look_ahead(self._deal(start, order))
        is_last = False
        while not is_last:
            try:
                (parts, counts, samples), is_last = next(rounds, NOTHING)
                parcels = [] if where is None else wire.pack_batches(parts[1:], where)
            except Exception as error:
                if where is not None:
                    wire.send_error(error, where)
                raise
            if where is not None and not parts:
                wire.send_end(where)
            if not parts:
                return
            if where is not None:
                wire.send(parcels, counts, is_last=is_last, samples=samples, device=where)
            yield Delivery(parts[0], counts, is_last, Position(start.epoch, samples))

    def _follow(self, start: Position, where: torch.device) -> Iterator[Delivery]:
        if not start:  # a resumed loop has drawn its seed already
            self._draw_seed()
        while (message := wire.receive(where)) is not None:
            position = Position(start.epoch, message.samples)
            yield Delivery(message.batch, message.round, message.is_last, position)
            if message.is_last:
                return

    @property
    def _has_seeded_workers(self) -> bool:
        return super()._has_seeded_workers or (self.persistent_workers and self._has_drawn_seed)

    def _draw_seed(self) -> None:
        """Draw the seed that rank 0's iterator draws for its workers, so that all ranks draw the same from then on."""
        if not self._has_seeded_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self._has_drawn_seed, self._progress.has_seeded_workers = True, False

    def _deal(self, start: Position, order: Order | None) -> Iterator[tuple[list[Any], Round, int]]:
        """Yield the batches of every round, their counts, and the samples of the epoch up to its end."""
        if not start:
            self._check()
        portions = self._portions()
        if self._walked is None:
            skip = 0 if start else self.skip_batches
            first, batches = self._stream(start, order, keeps_first=portions.fills)
        else:
            skip, is_rest = 0, bool(start) or self.skip_batches > 0
            first = self._read_first_round(order) if is_rest and portions.fills else []
            batches = ((counted(delivery.batch), delivery.position.samples) for delivery in self._walk(start, order))
        yield from itertools.islice(portions.deal(batches, first), skip, None)

    def _stream(
        self, start: Position, order: Order | None, *, keeps_first: bool
    ) -> tuple[list[CountedBatch], Iterator[tuple[CountedBatch, int]]]:
        """Return the first round of an epoch that is read from its middle on, and the batches from there on."""
        owners = self._owners()
        self._progress.order = order or Order.capture(owners)
        with contextlib.nullcontext() if order is None else order.replayed(owners):
            poses = self._reads_for_all and not self.num_workers
            fetched = map(counted, open_as_only_rank(self._open_base) if poses else self._open_base())
            first = list(itertools.islice(fetched, self._fetched_per_round)) if start and keeps_first else []
            batches = itertools.chain(first, fetched)
            rest = _read_past(batches, start.samples)
        return first, _with_samples(itertools.chain(rest, batches), start.samples)

    def _read_first_round(self, order: Order | None) -> list[CountedBatch]:
        """Read the epoch's first round apart from its rest; all generators are as before."""
        owners = [*self._owners(), *generator_owners([self])]
        before = Order.capture(owners)
        indices = WalkedSampler(sampler_chain(self)[0])
        indices.begin_at(0, order)
        fetching = {"collate_fn": self._fetching()["collate_fn"], "generator": self.generator}
        with before.replayed(owners):
            # As in `_walk`: the iterator draws a seed for workers, and a resumed loop has drawn its seed already.
            with contextlib.nullcontext() if order is None else torch.random.fork_rng(devices=[]):
                fetched = iter(DataLoader(self.dataset, **data_arguments(self, indices), **fetching))
            first = list(map(counted, itertools.islice(without_label(fetched), self._fetched_per_round)))
        before.restore_generators(owners)
        return first

    def without_first(self, num_batches: int) -> DataLoaderDispatcher:
        """Return a loader of the same kind that begins `num_batches` later."""
        return DataLoaderDispatcher(
            self.dataset,
            self.split_batches,
            self.skip_batches + num_batches,
            self.use_stateful_dataloader,
            self._drop_last,
            self._non_blocking,
            self.slice_fn,
            self.iteration,
            device=self.device,
            num_processes=self.num_processes,
            even_batches=self.even_batches,
            uneven=self.uneven,
            stack=self.active_loaders,
            progress=self._progress,
            **self._arguments(),
        )


def _with_samples(batches: Iterable[CountedBatch], samples: int) -> Iterator[tuple[CountedBatch, int]]:
    for batch in batches:
        samples += batch.rows
        yield batch, samples


def _read_past(batches: Iterator[CountedBatch], skip: int) -> list[CountedBatch]:
    """Read `skip` samples, and return the rest of the batch in which they end."""
    while skip > 0:
        batch = next(batches, None)
        rows = 0 if batch is None else batch.rows
        if batch is not None and rows > skip:
            return [batch._replace(batch=batch.take(skip, rows), rows=rows - skip)]
        skip -= rows or skip
    return []
