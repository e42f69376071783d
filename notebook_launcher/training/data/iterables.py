"""Shares of iterable data sets, which have no indices: ranks read streams and keep in step."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from notebook_launcher.training.data.rows import Round, check_split, uneven_error
from notebook_launcher.training.data.samplers import length_of
from notebook_launcher.training.data.sharding import BatchSamplerShard, Share
from notebook_launcher.training.fingerprints import digest_of
from notebook_launcher.training.operations import broadcast_object_list, find_batch_size, gather_object
from notebook_launcher.training.operations.checking import gather_digest, gather_numbers
from notebook_launcher.training.user_warnings import notify_or_warn
from notebook_launcher.wording import describe_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# --------------------------------------------------------------------------------------------------------------------
# One rank's share of an iterable data set that every rank reads.


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
        return (self.batch_size or 1) // (self.num_processes if self.split_batches else 1)

    @property
    def per_round(self) -> int:
        """Elements of a full round for all ranks."""
        return self.per_rank * self.num_processes

    @property
    def _sharing(self) -> BatchSamplerShard:
        """The rule by which rounds are shared out, as if elements were indices."""
        evens = self.even_batches or self.uneven == "leave"
        return BatchSamplerShard(
            self, self.num_processes, self.process_index, self.split_batches, evens, uneven=self.uneven
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, if the data set has several."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds, left = divmod(len(self.dataset), self.per_round)
        stops = not self.even_batches and self.uneven == "stop"
        complete = left and not self.drop_last and not (stops and left <= self.per_round - self.per_rank)
        return (rounds + bool(complete)) * self.per_rank

    def check(self) -> None:
        """Raise ValueError if `uneven="error"` and it is known that the last round is not for all ranks."""
        length = length_of(self.dataset)
        if length is not None and not self.even_batches and self.uneven == "error" and not self.drop_last:
            left = length % self.per_round
            if 0 < left <= self.per_round - self.per_rank:
                raise uneven_error(f"{left} of {self.per_round} samples are left for the last round")

    def __iter__(self) -> Iterator[Any]:
        for share in self.open()[1]:
            yield from share.indices

    def open(self, skip: int = 0) -> tuple[list[Any], Iterator[Share]]:
        """Return the elements of all ranks with which the stream begins, and this rank's elements, round by round.

        The shares' `samples` are the elements of the stream that all ranks together have had.

        Args:
            skip: Number of consumed elements of the stream; they are read at once.

        Raises:
            ValueError: With `uneven="error"`, where the data set ends with some ranks' elements only.
        """
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        sharing, stream = self._sharing, iter(self.dataset)
        size, per_round = self.batch_size or 1, self.per_rank * sharing.num_processes
        first = list(itertools.islice(stream, per_round))
        collections.deque(itertools.islice(stream, max(0, skip - per_round)), maxlen=0)
        rest = itertools.chain(first[skip:], stream)
        start = [first[at : at + size] for at in range(0, len(first), size)]

        def shares() -> Iterator[Share]:
            consumed = skip

            def read() -> list[Any]:
                nonlocal consumed
                batch = list(itertools.islice(rest, size))
                consumed += len(batch)
                return batch

            for share in sharing.deal(iter(read, []), start, None, 0, self._count):
                yield Share(share.indices, share.round, consumed)

        return first, shares()

    def _count(self, part: list[Any]) -> int:
        return len(part) if self.batch_size else sum(find_batch_size(batch) or 1 for batch in part)


# --------------------------------------------------------------------------------------------------------------------
# Steps of ranks that read different streams: before each round they exchange the counts of their batches.


OWN_SHARDS = -1
"""The value of `Position.stream` where every rank reads streams of its own."""


class Report(NamedTuple):
    """A rank's report of the batch that it has read; all zero at its end."""

    rows: int
    """Samples of the batch."""
    real: int
    """Samples that no rank has had before."""
    weight: int
    """The batch's weight in a window's mean."""
    stream: int
    """The stream that the batch comes from."""
    consumed: int
    """Samples of that stream so far."""


def in_step(
    batches: Iterator[tuple[Any, Receipt]], shard: OwnShards
) -> Iterator[tuple[Any, Round, bool, list[Report]]]:
    """Yield batches that ranks read for themselves, equally many on every rank; every rank must ask for each round.

    Ranks that have read everything before the others repeat their first batch: with `even_batches` it counts, with
    `uneven="weigh"` it has weight 0. With `drop_last` and `uneven="stop"` the first round that lacks a batch is left
    out, and ends the epoch.

    Yields:
        This rank's batch, the round, True if it is the last one, and the reports of all ranks.

    Raises:
        ValueError: With `uneven="error"`, on every rank, where some ranks have a batch and others have none.
    """
    rank, uneven = shard.process_index, "" if shard.even_batches else shard.uneven

    def read() -> tuple[Any, list[Report]]:
        batch, mine = None, Report(0, 0, 0, 0, 0)
        if (found := next(batches, None)) is not None:
            batch, receipt = found
            counts = receipt.round
            mine = Report(counts.rows[0], counts.real[0], counts.weights[0], receipt.stream, receipt.consumed)
        return batch, [Report(*numbers) for numbers in gather_numbers(mine)]

    def is_over(reports: list[Report]) -> bool:
        have = [report.rows > 0 for report in reports]
        return not any(have) or ((shard.drop_last or uneven == "stop") and not all(have))

    batch, reports = read()
    first, first_rows = batch, [report.rows for report in reports]
    owner = next((each for each, rows in enumerate(first_rows) if rows), None)
    if owner is not None and not all(first_rows):  # Ranks without any batch repeat another rank's.
        example = [batch if rank == owner else None]
        broadcast_object_list(example, from_process=owner)
        first = batch if first_rows[rank] else example[0]
        first_rows = [rows or first_rows[owner] for rows in first_rows]
    while not is_over(reports):
        following, next_reports = read()
        lacking = [each for each, report in enumerate(reports) if not report.rows]
        if lacking and uneven == "error":
            raise uneven_error(f"rank {', '.join(map(str, lacking))} has read everything, others have more")
        rows = tuple(report.rows or again for report, again in zip(reports, first_rows, strict=True))
        repeated = rows if shard.even_batches else (0,) * len(rows)
        weights = (report.weight if report.rows else again for report, again in zip(reports, repeated, strict=True))
        drawn = Round(rows, tuple(report.real for report in reports), tuple(weights))
        yield first if rank in lacking else batch, drawn, is_over(next_reports), reports
        batch, reports = following, next_reports


def wrong_readers(num_numbers: int, now: str) -> ValueError:
    """Return the error for a position at which other ranks or workers read; `now` names the readers."""
    return ValueError(
        f"This position was saved where data were read by other ranks or workers ({num_numbers} numbers), and here "
        f"{now}. Load it with the same number of ranks and num_workers, or restart the epoch with set_epoch()."
    )


# --------------------------------------------------------------------------------------------------------------------
# Streams of which every rank reads its own shards, and streams that would leave out others' shards.
#
# Hugging Face's `datasets`, and data sets that were made for one rank, are read by every rank. Others find out the
# rank when they are read, as WebDataset's `split_by_node` does. Where a rank reads for all, such a data set is told
# that there is but one rank: it gives all samples, and the loader shares them out.


NAMES = (
    ("rank", "world_size"),
    ("rank", "num_replicas"),
    ("global_rank", "world_size"),
    ("process_index", "num_processes"),
    ("dp_rank", "dp_world_size"),
)
"""Attributes by which a data set shows that it was made for one of several ranks."""
ONLY_RANK = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NTASKS"), "1"),
}
"""Environment variables that name the rank and the number of ranks, and their values for the only rank."""
ONLY_PROCESS = {"process_index": 0, "local_process_index": 0, "num_processes": 1}
"""The same, as attributes of Accelerate's states."""


def shards_of_rank(dataset: Any, num_processes: int, process_index: int) -> Any:
    """Return the part of a streamed data set that this rank reads; None if every rank must read everything.

    Raises:
        ValueError: The data set was split by the user, and not for this rank of these ranks.
    """
    if (split := split_of(dataset)) is not None:
        if split != (process_index, num_processes):
            raise ValueError(
                f"prepare() got a data set that was split for rank {split[0]} of {split[1]}, and this is "
                f"rank {process_index} of {num_processes}: a share of a share would miss samples. Leave out "
                "split_dataset_by_node, or whatever splits it; prepare() shares out."
            )
        return dataset
    if not _is_stream(dataset) or not hasattr(dataset, "shard") or dataset.n_shards < num_processes:
        return None
    return dataset.shard(num_shards=num_processes, index=process_index)


def split_of(dataset: Any) -> tuple[int, int] | None:
    """Return the rank, and the number of ranks, for which a stream was made; None if it was made for all.

    It was made by `split_dataset_by_node`, or has a `rank` of its own.
    """
    if _is_stream(dataset):
        split = getattr(dataset, "_distributed", None)
        return None if split is None else (split.rank, split.world_size)
    held = {name.lstrip("_"): value for name, value in getattr(dataset, "__dict__", {}).items() if type(value) is int}
    pairs = ((held[rank], held[size]) for rank, size in NAMES if rank in held and size in held)
    return next(((rank, size) for rank, size in pairs if 0 <= rank < size > 1), None)


MAX_ITEMS = 10_000
"""Items of a list that are compared between ranks."""
MAX_NESTED = 100
"""The same, of a list that holds objects."""
MAX_HELD = 1000
"""Numbers, texts, arrays and lists of a data set that are compared."""


def compare_data_sets(dataset: Any) -> None:
    """Say if a data set was made otherwise on other ranks, by what it holds; every rank calls this.

    One that asked for its rank when it was made, and not when it is read, would have its samples shared out once more,
    or those of rank 0 alone.
    """
    held = dict(itertools.islice(_held(dataset), MAX_HELD))
    if len(set(gather_digest(repr(sorted(held.items()))))) == 1:
        return
    by_rank = gather_object([{name: describe_value(value) for name, value in held.items()}])
    name = next((name for name in held if len({of_rank.get(name) for of_rank in by_rank}) > 1), None)
    if dist.get_rank() or name is None:
        return
    odd = next(rank for rank, of_rank in enumerate(by_rank) if of_rank.get(name) != by_rank[0].get(name))
    notify_or_warn(
        f"the data set differs between ranks: {name or 'it'} is {by_rank[0].get(name, 'not there')} on rank 0 and "
        f"{by_rank[odd].get(name, 'not there')} on rank {odd}. If each rank's data set has samples of its own, many of "
        "them are never read: rank 0 reads for all, or each rank takes a share of its own. Make it alike on every "
        "rank, with all samples; or make a stream with attributes called rank and world_size, by which a share is "
        "recognised."
    )


def _held(value: Any, name: str = "", depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Yield what a data set, and the data sets and stages within it, hold of numbers, texts, arrays, and lists of them.

    Seeds may differ: the streams that they shuffle are compared by what they give.
    """
    if isinstance(value, (list, tuple)) and not all(type(item) in (bool, int, str) for item in value[:MAX_ITEMS]):
        parts = {f"{name}[{at}]": item for at, item in enumerate(value[:MAX_NESTED])}
    elif isinstance(value, (list, tuple)):
        yield name, value[:MAX_ITEMS]
        return
    elif type(value) in (bool, int, str, range):
        yield name, value
        return
    elif hasattr(value, "dtype") and getattr(value, "ndim", False):
        yield name, f"{describe_value(value)} that begins with {value[:8].tolist()}"
        return
    else:
        attributes = {} if isinstance(value, (type, torch.nn.Module)) else getattr(value, "__dict__", {})
        parts = {f"{name}.{each}".lstrip("."): item for each, item in attributes.items() if "seed" not in each}
    if depth:
        for inner, item in parts.items():
            yield from _held(item, inner, depth - 1)


def open_as_only_rank(open_loader: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Open a loader without workers, and return what it fetches; whatever asks meanwhile is told: rank 0 of 1 reads."""
    with _as_only_rank():
        fetched = open_loader()

    def read() -> Iterator[Any]:
        while True:
            with _as_only_rank():
                try:
                    batch = next(fetched)
                except StopIteration:
                    return
            yield batch

    return read()


@contextlib.contextmanager
def _as_only_rank() -> Iterator[None]:
    """Tell whatever asks in this thread, inside the block, that rank 0 of 1 reads."""
    thread = threading.get_ident()
    # The methods of the group, because a data set may have imported `get_rank` by its name.
    methods = {name: vars(dist.ProcessGroup)[name] for name in ("rank", "size")} if dist.is_available() else {}
    size = dist.get_world_size() if methods and dist.is_initialized() else 1

    def replaced(ask: Callable[..., int], answer: int) -> Callable[..., int]:
        def answered(group: Any) -> int:
            return answer if threading.get_ident() == thread and methods["size"](group) == size else ask(group)

        return answered

    variables = {name: os.environ[name] for name in ONLY_RANK if name in os.environ}
    states = [(state, {name: state[name] for name in ONLY_PROCESS}) for state in _accelerates_states()]
    os.environ.update({name: ONLY_RANK[name] for name in variables})
    for (name, ask), answer in zip(methods.items(), (0, 1), strict=False):
        setattr(dist.ProcessGroup, name, replaced(ask, answer))
    for state, _ in states:
        state.update(ONLY_PROCESS)
    try:
        yield
    finally:
        os.environ.update(variables)
        for name, ask in methods.items():
            setattr(dist.ProcessGroup, name, ask)
        for state, values in states:
            state.update(values)


def _accelerates_states() -> Iterator[dict[str, Any]]:
    """Yield the attributes that all of Hugging Face Accelerate's states share, if they name the rank."""
    module = sys.modules.get("accelerate.state")
    for name in ("PartialState", "AcceleratorState"):
        state = getattr(getattr(module, name, None), "_shared_state", {})
        if ONLY_PROCESS.keys() <= state.keys():
            yield state


def _is_stream(dataset: Any) -> bool:
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


class OwnShards(IterableDatasetShard):
    """The elements that one rank reads of a data set, while other ranks read others.

    A rank that reads cannot know what the others have; see `in_step`. Its rounds count this rank alone: with
    `even_batches` its own last batch is filled with elements from its start.
    """

    def __len__(self) -> int:
        raise TypeError(
            "len(): the number of elements in a rank's shards is known only at their end. Count the batches in the "
            "loop, or give a progress bar the number yourself: tqdm(loader, total=...)."
        )

    @property
    def _sharing(self) -> BatchSamplerShard:
        return BatchSamplerShard(self, 1, 0, False, self.even_batches, uneven=self.uneven)

    def check(self) -> None:
        """Do nothing, because lengths are not known."""


# --------------------------------------------------------------------------------------------------------------------
# Streams of an iterable data set: batches with the place in the stream that they come from.
#
# A stream is read in worker processes, where its end is seen first. So each element carries a receipt of its round
# there, and the batch that is made of them brings the receipt to the process that trains.


class Receipt(NamedTuple):
    """The origin of a batch."""

    round: Round
    stream: int
    """The worker whose stream the batch comes from; 0 without workers."""
    consumed: int
    """Number of elements of that stream up to and including the batch."""
    digest: str
    """Digest of the stream's first round, with which other ranks must begin, too; empty where it is unknown."""


class StreamWithReceipts(IterableDataset[Any]):
    """Yields `(element, Receipt)`; `(None, None)` for the elements of a batch to be dropped."""

    def __init__(self, shard: IterableDatasetShard, num_workers: int, *, persistent: bool) -> None:
        self.shard = shard
        # The epoch, the stream that was read last, and the number of samples read of each stream.
        self._orders = torch.zeros(2 + max(1, num_workers), dtype=torch.int64)
        if persistent:
            # Such workers get the data set once, and orders at every epoch.
            self._orders.share_memory_()

    def order(self, epoch: int, last_stream: int, consumed: Sequence[int]) -> None:
        """Set the place at which the next iteration begins."""
        wanted = [epoch, last_stream, *consumed]
        self._orders.zero_()
        self._orders[: len(wanted)] = torch.tensor(wanted)

    def __iter__(self) -> Iterator[tuple[Any, Receipt | None]]:
        worker = get_worker_info()
        stream = 0 if worker is None else worker.id
        epoch, last_stream, *consumed = self._orders.tolist()
        if worker is not None:
            self.shard.set_epoch(epoch)
        skip = consumed[stream]
        start, shares = self.shard.open(skip)
        if skip and stream <= last_stream:
            # torch begins with worker 0. Workers before the one whose turn it is pass.
            yield from [(None, None)] * self.shard.per_rank
        digest = ""
        if start and self.shard.num_processes > 1:
            with contextlib.suppress(Exception):  # elements may raise anything when they are pickled
                digest = digest_of(start)
        for share in shares:
            receipt = Receipt(share.round, stream, share.samples, digest)
            for element in share.indices:
                yield element, receipt


class CollateWithReceipt:
    """Collates elements that carry receipts into `(batch, Receipt)`; `(None, None)` passes through."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, batched: bool) -> None:
        self._collate_fn = collate_fn
        self._batched = batched

    def __call__(self, items: Any) -> tuple[Any, Receipt | None]:
        """Collate one batch; in a loader without `batch_size`, one element."""
        receipt = items[0][1] if self._batched else items[1]
        if receipt is None:
            return None, None
        elements = [element for element, _ in items] if self._batched else items[0]
        return self._collate_fn(elements), receipt


class StartWorker:
    """A `worker_init_fn` for a worker that reads a stream: the user's is called where the user's data set is shown.

    Args:
        worker_init_fn: The user's.
        reads_for_all: True if whatever asks in the worker is told that rank 0 of 1 reads.
    """

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, *, reads_for_all: bool) -> None:
        self._worker_init_fn = worker_init_fn
        self._reads_for_all = reads_for_all

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker, for as long as it lives."""
        if self._reads_for_all:
            self._pose = _as_only_rank()  # Kept: it ends with its object.
            self._pose.__enter__()
        if self._worker_init_fn is not None:
            info = get_worker_info()
            if info is not None and isinstance(info.dataset, StreamWithReceipts):
                # torch documents functions that change `get_worker_info().dataset`; that object refuses assignment.
                object.__setattr__(info, "dataset", info.dataset.shard.dataset)
            self._worker_init_fn(worker_id)
