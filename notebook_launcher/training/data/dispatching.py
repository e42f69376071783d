"""Batches that rank 0 reads for all ranks: cut into portions and sent."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from notebook_launcher.training.data.iterables import StartWorker
from notebook_launcher.training.data.loader import Delivery, PreparedLoader, data_arguments, look_ahead, without_label
from notebook_launcher.training.data.position import Order, Position, generator_owners
from notebook_launcher.training.data.rows import (
    CountedBatch,
    CountingCollate,
    Round,
    counted,
    join_batches,
    uneven_error,
    values_of_batch,
)
from notebook_launcher.training.data.samplers import length_of, sampler_chain
from notebook_launcher.training.data.sharding import Walk
from notebook_launcher.training.operations.checking import sending_device
from notebook_launcher.training.operations.collectives import world_size
from notebook_launcher.wording import type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


# --------------------------------------------------------------------------------------------------------------------
# The loader of ranks that get their batches from rank 0.


NOTHING: Any = ([], None, 0), True
"""A round of a data set without data."""


class DataLoaderDispatcher(PreparedLoader):
    """A `DataLoader` that rank 0 iterates, dealing out its batches to all ranks.

    Only rank 0 touches the data set. Structure and types of batches are kept; what is not a tensor travels by
    pickle. An exception in the data set is raised on every rank.

    Args:
        dataset: As `DataLoader`'s.
        split_batches: True if every batch is cut among the ranks; False: each rank gets whole ones.
        skip_batches: See `PreparedLoader`, as for all that is not here.
        slice_fn: See `Portions.slice_fn`.
        num_processes: Number of ranks that share the data; None: all.
        even_batches: See `Portions`.
        uneven: See `Portions`; `"leave"` is as `even_batches`, since Accelerate always evens out here.
    """

    OWN = ("split_batches", "slice_fn", "num_processes", "even_batches", "uneven")

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        *,
        num_processes: int | None = None,
        even_batches: bool = True,
        uneven: str = "leave",
        **kwargs: Any,
    ) -> None:
        self.slice_fn = slice_fn
        self.even_batches = even_batches
        self.uneven = uneven
        self.split_batches = split_batches
        self.num_processes = world_size() if num_processes is None else num_processes
        self._place = dist.get_rank() if self.num_processes > 1 and world_size() > 1 else 0
        self._reads_for_all = self.num_processes > 1 and isinstance(dataset, IterableDataset)
        self._has_drawn_seed = False
        """True once this rank, which does not read, has drawn the seed of rank 0's workers."""
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            **kwargs,
        )
        self.base_dataloader = self._make_base()

    def _fetching(self) -> dict[str, Any]:
        arguments = super()._fetching()
        is_ready = self.batch_sampler is None and self.batch_size is None
        if is_ready or self.collate_fn is not default_collate:  # Torch's own makes a row of each sample.
            arguments["collate_fn"] = CountingCollate(self.collate_fn, is_ready=is_ready)
        if self._reads_for_all and self.num_workers:
            arguments["worker_init_fn"] = StartWorker(self.worker_init_fn, reads_for_all=True)
        return arguments

    @property
    def _fetched_per_round(self) -> int:
        return 1 if self.split_batches else self.num_processes

    def __len__(self) -> int:
        num_batches = len(self.base_dataloader)
        if self._walked is None:
            num_batches = max(0, num_batches - self.skip_batches * self._fetched_per_round)
        rounds, left = divmod(num_batches, self._fetched_per_round)
        if self.even_batches or self.uneven != "stop":
            return rounds + (left > 0 and not self._drop_last)
        return rounds - self._has_small_tail()

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
        if self._reads_for_all:
            self._compare_once(self.dataset)

    def _deliveries(self, start: Position, order: Order | None) -> Iterator[Delivery]:
        where = torch.device("cpu" if self.device is None else self.device)
        if self._place == 0:
            deliveries = self._lead(start, order, where if self.num_processes > 1 else None)
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
                messages: list[Any] = [(part, counts, is_last, samples) for part in parts[1:]]
                messages = messages if parts else [None] * (self.num_processes - 1)
                parcels = [] if where is None else [pack(message, where) for message in messages]
            except Exception as error:
                if where is not None:
                    send([pack(_picklable(error), where)] * (self.num_processes - 1), where)
                raise
            if where is not None:
                send(parcels, where)
            if not parts:
                return
            yield Delivery(parts[0], counts, is_last, Position(start.epoch, samples))

    def _follow(self, start: Position, where: torch.device) -> Iterator[Delivery]:
        if not start:  # a resumed loop has drawn its seed already
            # As rank 0's iterator draws one for its workers, so that all ranks draw the same from then on.
            if not self._has_seeded_workers:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._has_drawn_seed, self._progress.has_seeded_workers = True, False
        is_last = False
        while not is_last and (message := receive(where)) is not None:
            if isinstance(message, Exception):
                raise message
            batch, counts, is_last, samples = message
            yield Delivery(batch, counts, is_last, Position(start.epoch, samples))

    @property
    def _has_seeded_workers(self) -> bool:
        return super()._has_seeded_workers or (self.persistent_workers and self._has_drawn_seed)

    def _deal(self, start: Position, order: Order | None) -> Iterator[tuple[list[Any], Round, int]]:
        """Yield the batches of every round, their counts, and the samples of the epoch up to its end."""
        if not start:
            self._check()
        portions = Portions(
            num_processes=self.num_processes,
            split=self.split_batches,
            even=self.even_batches or self.uneven == "leave",
            uneven=self.uneven,
            drop_last=self._drop_last,
            slice_fn=self.slice_fn,
        )
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
        with self._opened_stream(order) as opened:
            fetched = map(counted, opened)
            first = list(itertools.islice(fetched, self._fetched_per_round)) if start and keeps_first else []
            batches = itertools.chain(first, fetched)
            rest = _read_past(batches, start.samples)
        return first, _with_samples(itertools.chain(rest, batches), start.samples)

    def _read_first_round(self, order: Order | None) -> list[CountedBatch]:
        """Read the epoch's first round apart from its rest; all generators are as before."""
        owners = [*self._owners(), *generator_owners([self])]
        before = Order.capture(owners)
        indices = Walk(sampler_chain(self)[0], 0, order)
        fetching = {"collate_fn": self._fetching()["collate_fn"], "generator": self.generator}
        with before.replayed(owners):
            # As in `_walk`: the iterator draws a seed for workers, and a resumed loop has drawn its seed already.
            with contextlib.nullcontext() if order is None else torch.random.fork_rng(devices=[]):
                fetched = iter(DataLoader(self.dataset, **data_arguments(self, indices), **fetching))
            first = list(map(counted, itertools.islice(without_label(fetched), self._fetched_per_round)))
        before.restore_generators(owners)
        return first


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


# --------------------------------------------------------------------------------------------------------------------
# Portions: the ranks' parts of the batches that rank 0 reads for all.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Portions:
    """Deals batches out, round by round.

    A round is a batch for every rank, or with `split` a slice of one batch for every rank. A batch in the
    middle that does not divide evenly is cut into parts that differ by one sample. The last round, where it is
    less than a batch for every rank or cannot be cut evenly:

    - `drop_last`: is left out, if it has less than a batch for every rank;
    - `even`: its samples, and as many from the epoch's start as are missing, are dealt out evenly;
    - otherwise each rank gets what there is, and with `uneven="weigh"` ranks for which there is nothing get some
      other rank's samples with weight 0; `"stop"` leaves the round out and `"error"` raises ValueError then.
    """

    num_processes: int
    split: bool = False
    even: bool = True
    uneven: str = "weigh"
    drop_last: bool = False
    slice_fn: Callable[..., Any] | None = None
    """Cuts a rank's part out of a batch: `slice_fn(batch, slice, process_index=..., num_processes=...)`."""

    def deal(
        self, batches: Iterable[tuple[Any, int]], first: Sequence[Any] = ()
    ) -> Iterator[tuple[list[Any], Round, int]]:
        """Yield for each round every rank's batch, what all of them count, and the number of samples up to its end.

        Batches come with the number of samples up to their end. `first` is the first round of the epoch, if they are
        the rest of one.
        """
        per_round = 1 if self.split else self.num_processes
        group: list[CountedBatch] = []
        start = list(map(counted, first))
        if start and not self._is_even(start):
            start = []
        samples = 0
        for batch, samples_with_it in batches:
            if len(group) == per_round:
                yield *self._middle(group), samples
                group = []
            group.append(counted(batch))
            samples = samples_with_it
            if len(group) == per_round and self._is_even(group):
                if not start and self.fills:
                    start = group
                yield *self._middle(group), samples
                group = []
        if group and (last := self._last(group, start)) is not None:
            yield *last, samples

    @property
    def fills(self) -> bool:
        """True if a short last round gets samples from the epoch's start."""
        return self.even and not self.drop_last

    def _is_even(self, group: Sequence[CountedBatch]) -> bool:
        if self.split:
            return group[0].rows % self.num_processes == 0
        return len({batch.rows for batch in group}) == 1

    def _middle(self, group: list[CountedBatch]) -> tuple[list[Any], Round]:
        if self.slice_fn is not None and self._is_even(group):
            joined = _joined(group)
            rows = (joined.rows // self.num_processes,) * self.num_processes
            return self._slices(joined, rows), Round(rows, rows, rows)
        return self._apart(group[0]) if self.split else _whole(group)

    def _last(self, group: list[CountedBatch], start: list[CountedBatch]) -> tuple[list[Any], Round] | None:
        missing = 0 if self.split else self.num_processes - len(group)
        if self.drop_last and missing:
            return None
        if self.even:
            return self._evened(group, start)
        total = sum(batch.rows for batch in group)
        small = missing > 0 or (self.split and total < self.num_processes)
        if small and self.uneven == "stop":
            return None
        if small and self.uneven == "error":
            raise uneven_error(f"{total} samples are left for {self.num_processes} ranks")
        return self._apart(group[0]) if self.split else _whole(group, missing)

    def _evened(self, group: list[CountedBatch], start: list[CountedBatch]) -> tuple[list[Any], Round]:
        try:
            return self._evened_by_samples(group, start)
        except (RuntimeError, TypeError):
            # Batches of different widths, for instance, or that cannot be cut: some ranks repeat a whole one.
            if self.split:
                raise
            parts, drawn = _whole(group, self.num_processes - len(group))
            return parts, dataclasses.replace(drawn, weights=drawn.rows)

    def _evened_by_samples(self, group: list[CountedBatch], start: list[CountedBatch]) -> tuple[list[Any], Round]:
        for batch in group:
            if not batch.can_be_cut:
                raise TypeError(
                    f"the last batch cannot be cut evenly for the ranks: {type_of(batch.batch)} has no rows to "
                    "count. Let collate_fn return tensors or lists with a row for each sample, or pass "
                    "dispatch_batches=False so that every rank reads the data itself."
                )
        values = [values_of_batch(batch.batch, batch.rows, batch.lists) for batch in group]
        if any(others != values[0] for others in values):
            raise TypeError("numbers of the batches as a whole, such as of their tokens, differ.")
        total = sum(batch.rows for batch in group)
        size = -(-total // self.num_processes)
        filler = itertools.cycle(self._first_samples(start or group))
        joined = _joined([*group, *itertools.islice(filler, size * self.num_processes - total)])
        rows = (size,) * self.num_processes
        real = tuple(min(size, max(0, total - rank * size)) for rank in range(self.num_processes))
        return self._slices(joined, rows), Round(rows, real, rows)

    def _first_samples(self, group: list[CountedBatch]) -> list[CountedBatch]:
        """Return up to one sample for every rank, as batches of one."""
        found: list[CountedBatch] = []
        for batch in group:
            wanted = min(batch.rows, self.num_processes - len(found))
            found += [batch._replace(batch=batch.take(row, row + 1), rows=1) for row in range(wanted)]
        return found

    def _apart(self, batch: CountedBatch) -> tuple[list[Any], Round]:
        """Cut a batch into parts that differ by one sample at most; ranks without a part repeat the first."""
        small, more = divmod(batch.rows, self.num_processes)
        real = tuple(small + (rank < more) for rank in range(self.num_processes))
        return self._slices(batch, real), Round(tuple(max(1, count) for count in real), real, real)

    def _slices(self, batch: CountedBatch, sizes: Iterable[int]) -> list[Any]:
        ends = itertools.accumulate(sizes)
        bounds = [slice(end - size, end) if size else slice(0, 1) for size, end in zip(sizes, ends, strict=True)]
        if self.slice_fn is None:
            return [batch.take(bound.start, bound.stop) for bound in bounds]
        return [
            self.slice_fn(batch.batch, bound, process_index=rank, num_processes=self.num_processes)
            for rank, bound in enumerate(bounds)
        ]


def _joined(batches: list[CountedBatch]) -> CountedBatch:
    lists = frozenset[str]().union(*(batch.lists for batch in batches))
    joined = join_batches([batch.batch for batch in batches], lists)
    return CountedBatch(joined, sum(batch.rows for batch in batches), can_be_cut=True, lists=lists)


def _whole(group: list[CountedBatch], missing: int = 0) -> tuple[list[Any], Round]:
    """Give each rank a batch; ranks without a batch repeat one, with weight 0."""
    dealt = [*group, *itertools.islice(itertools.cycle(group), missing)]
    real = (*(batch.rows for batch in group), *[0] * missing)
    return [batch.batch for batch in dealt], Round(tuple(batch.rows for batch in dealt), real, real)


# --------------------------------------------------------------------------------------------------------------------
# The wire from rank 0 to every rank: objects pickled, tensors as they lie in memory.
#
# For each round one small tensor tells all ranks how much comes, and then each rank's own message goes to that rank:
# its part, None at the end, or the error of the data set. With NCCL, a send by itself would make a communicator for
# each pair of ranks. Sends in a batch, as here, go over the group's own, which the broadcast before has made.


Parcel = tuple[torch.Tensor, list[torch.Tensor]]
"""A message on its way, in bytes: pickled without its tensors, and the tensors."""


def pack(message: Any, device: torch.device) -> Parcel:
    """Return a message for another rank; its tensors are on `device`, if the group can send from there."""
    where, file = sending_device(device), io.BytesIO()
    pickler = _TensorPickler(file, where)
    pickler.dump(message)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(where), list(map(_as_bytes, pickler.tensors))


def send(parcels: Sequence[Parcel], device: torch.device) -> None:
    """Send every other rank its message; all other ranks must call `receive`."""
    others = list(enumerate(parcels, 1))
    sizes = torch.tensor([0, *(objects.numel() for objects, _ in parcels)], device=sending_device(device))
    dist.broadcast(sizes, src=0)
    # In two batches, as they are received: the objects describe how large the tensors are.
    _exchange(
        [dist.P2POp(dist.isend, objects, rank) for rank, (objects, _) in others],
        [operation for rank, (_, tensors) in others for operation in _tensor_ops(dist.isend, tensors, rank)],
    )


def receive(device: torch.device) -> Any:
    """Return rank 0's next message for this rank."""
    where = sending_device(device)
    sizes = torch.empty(dist.get_world_size(), dtype=torch.int64, device=where)
    dist.broadcast(sizes, src=0)
    memory = bytearray(int(sizes[dist.get_rank()]))
    here = torch.frombuffer(memory, dtype=torch.uint8)
    wire = here.to(where)  # on the CPU the same memory
    _exchange([dist.P2POp(dist.irecv, wire, 0)])
    here.copy_(wire)
    unpickler = _TensorUnpickler(io.BytesIO(memory), where)
    message = unpickler.load()
    _exchange(_tensor_ops(dist.irecv, map(_as_bytes, unpickler.tensors), 0))
    return message


class _TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that leaves plain tensors out, and notes their shapes."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._device = device

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
            return None
        self.tensors.append(value.detach().resolve_conj().resolve_neg().to(self._device).contiguous())
        return tuple(value.shape), value.dtype


class _TensorUnpickler(pickle.Unpickler):
    """An unpickler that makes room for the tensors that were left out."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._device = device

    def persistent_load(self, pid: Any) -> torch.Tensor:
        shape, dtype = pid
        self.tensors.append(torch.empty(shape, dtype=dtype, device=self._device))
        return self.tensors[-1]


def _tensor_ops(operation: Callable[..., Any], tensors: Iterable[torch.Tensor], peer: int) -> list[dist.P2POp]:
    return [dist.P2POp(operation, part, peer, tag=1 + at) for at, part in enumerate(tensors) if part.numel()]


def _exchange(*batches: list[dist.P2POp]) -> None:
    """Begin one batch after another, and wait for all."""
    pending = [work for batch in batches if batch for work in dist.batch_isend_irecv(batch)]
    for work in filter(None, pending):
        work.wait()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:  # whatever the exception's own code raises
        return RuntimeError(f"the data set failed on rank 0: {type(error).__name__}: {error}")
    return error
