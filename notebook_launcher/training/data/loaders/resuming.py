"""Loaders without their first batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_launcher.settings.whole_numbers import whole_number
from notebook_launcher.training.argument_checks import check_instance
from notebook_launcher.training.data.dispatching.dispatcher import DataLoaderDispatcher
from notebook_launcher.training.data.loaders.loader_arguments import data_arguments, fetching_arguments
from notebook_launcher.training.data.loaders.shard import DataLoaderShard
from notebook_launcher.training.data.sampling.samplers import sampler_chain
from notebook_launcher.training.data.sampling.skipping import SkipBatchSampler

__all__ = ["SkipDataLoader", "skip_first_batches"]


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
