"""Preparation of a user's loader, so that each rank gets its share."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from notebook_launcher.settings.option_checks import whole_number
from notebook_launcher.training.data.dispatching import DataLoaderDispatcher
from notebook_launcher.training.data.iterables import IterableDatasetShard, OwnShards, shards_of_rank, split_of
from notebook_launcher.training.data.loader import data_arguments, fetching_arguments
from notebook_launcher.training.data.rows import check_split
from notebook_launcher.training.data.samplers import (
    SeedableRandomSampler,
    get_sampler,
    links_of,
    new_generator,
    sampler_chain,
)
from notebook_launcher.training.data.shard import DataLoaderShard
from notebook_launcher.training.data.sharding import BatchSamplerShard, SkipBatchSampler
from notebook_launcher.training.plugins import check_instance, check_uneven
from notebook_launcher.training.process.process_state import ProcessState
from notebook_launcher.training.user_warnings import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.training.accumulation.windows import ActiveLoaders


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | int | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    *,
    uneven: str = "weigh",
    check_ranks: bool = True,
    keeps_shares: bool = False,
    stack: ActiveLoaders | None = None,
) -> DataLoaderShard | DataLoaderDispatcher:
    """Return a loader that yields this rank's share of the batches of `dataloader`.

    No Accelerator knows of it: windows of accumulation do not end with it, and its samples are not counted. A loader
    for `accumulate` comes from `accelerator.prepare`.

    Args:
        dataloader: Loader to share out. If several ranks share the data, a random sampler without a generator gets
            one.
        device: Device that batches go to with `put_on_device`.
        num_processes: Number of ranks that share the data; None: all.
        process_index: Place of this process among them; None: its rank.
        split_batches: True if each rank gets a slice of every batch; False: every `num_processes`-th batch.
        put_on_device: True if batches are moved to `device`.
        rng_types: Generators that every rank takes from rank 0 before each epoch; None: the sampler's generator.
        dispatch_batches: True if rank 0 reads for all. None: for an iterable data set, if `put_on_device`. With
            False, every rank reads its own shards of a Hugging Face `datasets` stream that has enough of them.
        even_batches: True if the last round is filled with samples from the start.
        slice_fn_for_dispatch: Function that cuts a rank's part out of a batch that rank 0 read:
            `f(batch, slice, process_index=..., num_processes=...)`.
        use_seedable_sampler: True if a random order depends on a seed and the epoch alone.
        data_seed: That seed; None: the one that torch's generator was last given. Rank 0's counts.
        non_blocking: True if batches are copied to a GPU while the one before is computed on.
        use_stateful_dataloader: Accepted; prepared loaders always know their position.
        uneven: With `even_batches=False`, the conduct of a rank that has run out of batches before others:
            `"weigh"`, `"stop"`, `"error"` or `"leave"` (see `DataLoaderConfiguration.uneven`).
        check_ranks: True if ranks that read for themselves compare their epoch plans before each epoch.
            If so, all of them must begin each loop.
        keeps_shares: True if a `DistributedSampler` stays, so that its share is shared out again, as in Accelerate.
            False: it is replaced by the sampler with the same order of all samples.
        stack: Loaders that are being iterated; the loader is among them while it is iterated.

    Raises:
        ValueError: `uneven` is unknown, `split_batches` with a batch size that the ranks do not divide, or a data set
            that was split for other ranks, or is split and would be shared out again.
    """
    check_uneven(uneven)
    if num_processes is None or process_index is None:
        process = ProcessState()
        num_processes = process.num_processes if num_processes is None else num_processes
        process_index = process.process_index if process_index is None else process_index
    if split_batches:
        size, batches = dataloader.batch_size, sampler_chain(dataloader)[0]
        size = getattr(batches, "batch_size", None) if size is None else size
        check_split(size, num_processes, f"neither the loader nor its {type(batches).__name__} has a batch_size")
    dataset, size, drop_last = dataloader.dataset, dataloader.batch_size, dataloader.drop_last
    is_stream = isinstance(dataset, IterableDataset)
    indices = None if is_stream else sampler_chain(dataloader)[0]
    if indices is not None and isinstance(get_sampler(dataloader), DistributedSampler):
        indices = _without_shares(dataloader, indices, num_processes, keeps_shares=keeps_shares)
    elif indices is not None and use_seedable_sampler:
        indices = _seedable(dataloader, indices, data_seed)
    arguments: dict[str, Any] = {
        "device": device if put_on_device else None,
        "use_stateful_dataloader": use_stateful_dataloader,
        "stack": stack,
        "_drop_last": drop_last or bool(getattr(indices, "drop_last", False)),
        "_non_blocking": non_blocking,
        **fetching_arguments(dataloader),
    }
    policy: dict[str, Any] = {"even_batches": even_batches, "uneven": uneven}
    is_own_share = is_stream and split_of(dataset) is not None
    if is_own_share and num_processes > 1 and (dispatch_batches or split_batches):
        _refuse_share("dispatch_batches" if dispatch_batches else "split_batches", warns=keeps_shares)
    if put_on_device and is_stream and not is_own_share if dispatch_batches is None else dispatch_batches:
        return DataLoaderDispatcher(
            dataset,
            split_batches,
            num_processes=num_processes,
            slice_fn=slice_fn_for_dispatch,
            **policy,
            **arguments,
            **data_arguments(dataloader, indices),
        )
    if num_processes == 1:
        return DataLoaderShard(dataset, **arguments, **data_arguments(dataloader, indices))
    arguments.update(
        check_ranks=check_ranks,
        rng_types=["generator"] if rng_types is None else list(rng_types),
        synchronized_generator=_shared_generator(dataloader, indices),
    )
    share = num_processes, process_index, split_batches
    if indices is not None:
        return DataLoaderShard(
            dataset, **arguments, **data_arguments(dataloader, BatchSamplerShard(indices, *share, **policy))
        )
    own = None if split_batches else shards_of_rank(dataset, num_processes, process_index)
    if own is not None and uneven == "leave":
        return DataLoaderShard(own, **arguments, batch_size=size, drop_last=drop_last)
    kind, stream = (IterableDatasetShard, dataset) if own is None else (OwnShards, own)
    part = kind(stream, size, drop_last, *share, **policy)
    return DataLoaderShard(part, **arguments, batch_size=None if size is None else part.per_rank, drop_last=drop_last)


def _refuse_share(option: str, *, warns: bool) -> None:
    """Refuse, or as Accelerate does only warn of, ways of sharing that lose what the other ranks' shares hold."""
    text = (
        f"prepare() got a data set that was made for one rank, and with {option}=True that rank's share is shared out "
        "again: the samples of other shares are never read. Leave the option out, so that every rank reads its own "
        "share; or make the data set without a rank."
    )
    if not warns:
        raise ValueError(text)
    warn_user(text)


def _without_shares(dataloader: DataLoader[Any], indices: Any, num_processes: int, *, keeps_shares: bool) -> Any:
    """Return the batch sampler of all samples for one over a `DistributedSampler`, which has a rank's share alone."""
    sampler = get_sampler(dataloader)
    if 1 in (num_processes, sampler.num_replicas):
        return indices
    if keeps_shares:
        warn_user(
            "prepare() got a loader with a DistributedSampler, and shares that out again, as Accelerate does: only "
            f"1 of {sampler.num_replicas} samples is read. Leave the sampler out, and pass shuffle=True to the loader."
        )
        return indices
    if sampler.num_replicas != num_processes:
        raise ValueError(
            f"prepare() got a loader whose DistributedSampler is for {sampler.num_replicas} ranks, and the data are "
            f"for {num_processes}. Leave the sampler out: prepare() shares the data out."
        )
    # The samples of a round are those that its ranks would have had together.
    whole: Sampler[int] = SequentialSampler(sampler.dataset)
    if sampler.shuffle:
        whole = SeedableRandomSampler(sampler.dataset, data_seed=sampler.seed)
        whole.epoch = sampler.epoch
    return _with_sampler(indices, sampler, whole)


def _seedable(dataloader: DataLoader[Any], indices: Any, seed: int | None) -> Any:
    """Return a batch sampler whose random order depends on a seed and the epoch alone."""
    sampler = get_sampler(dataloader)
    if not isinstance(sampler, RandomSampler):
        return indices
    num_samples = sampler._num_samples  # noqa: SLF001 - None follows the data set's length, `num_samples` does not
    seedable = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, num_samples, sampler.generator, data_seed=seed
    )
    if isinstance(sampler, SeedableRandomSampler):
        seedable.epoch, seedable.is_chosen = sampler.epoch, sampler.is_chosen
    return _with_sampler(indices, sampler, seedable)


def _with_sampler(indices: Any, sampler: Any, replacement: Any) -> Any:
    """Return a batch sampler with `replacement` in the place of `sampler`; without a batch sampler, `replacement`."""
    if indices is sampler:
        return replacement
    if type(indices) is BatchSampler:
        # The user's loader keeps its own.
        indices = copy.copy(indices)
    owner = next(link for link in links_of(indices) if getattr(link, "sampler", None) is sampler)
    owner.sampler = replacement
    return indices


def _shared_generator(dataloader: DataLoader[Any], indices: Any) -> torch.Generator | None:
    """Return the generator that draws the order, the same on all ranks. A sampler without a generator gets one."""
    if indices is None:
        found = getattr(dataloader.dataset, "generator", None)
        return found if isinstance(found, torch.Generator) else None
    sampler = links_of(indices)[-1]
    if isinstance(sampler, SeedableRandomSampler):
        return None
    if getattr(sampler, "generator", sampler) is None and sampler is not dataloader.batch_sampler:
        # As in Accelerate: drawn where the loader is prepared, so that torch's generator continues alike.
        sampler.generator = new_generator(int(torch.empty((), dtype=torch.int64).random_().item()))
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


# --------------------------------------------------------------------------------------------------------------------
# Loaders without their first batches.


class SkipDataLoader(DataLoaderShard):
    """A `DataLoader` that leaves out the first `skip_batches` batches of each epoch."""

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader of the same data that begins `num_batches` later.

    The loader yields the rest of the epoch that `dataloader` is in; then `dataloader` continues with the next epoch.
    Data of a map-style data set are not loaded for the batches that are left out.

    Args:
        dataloader: A prepared loader, or any `DataLoader`.
        num_batches: Number of this rank's batches to leave out.

    Raises:
        TypeError: `dataloader` is not a DataLoader.
        ValueError: `num_batches` is not a whole number, or negative.
    """
    num_batches = whole_number("num_batches", num_batches, minimum=0)
    check_instance("dataloader", dataloader, DataLoader, "a prepared loader, or a DataLoader")
    if isinstance(dataloader, (DataLoaderShard, DataLoaderDispatcher)):
        return dataloader.without_first(num_batches)
    arguments = fetching_arguments(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(dataloader.dataset, num_batches, **data_arguments(dataloader, None), **arguments)
    rest = SkipBatchSampler(sampler_chain(dataloader)[0], num_batches)
    return DataLoader(dataloader.dataset, **data_arguments(dataloader, rest), **arguments)
