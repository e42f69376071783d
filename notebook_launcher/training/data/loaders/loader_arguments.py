"""The arguments of a loader that is made like another loader."""

from __future__ import annotations

from typing import Any

__all__ = ["data_arguments", "fetching_arguments"]

FETCHING = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def fetching_arguments(dataloader: Any) -> dict[str, Any]:
    """Return the arguments of a `DataLoader` that control fetching.

    `in_order` is not among them: the round of a batch is known by its place, and so is the position.
    """
    arguments = {name: getattr(dataloader, name) for name in FETCHING}
    if dataloader.pin_memory_device:
        arguments["pin_memory_device"] = dataloader.pin_memory_device
    return arguments


def data_arguments(dataloader: Any, indices: Any) -> dict[str, Any]:
    """Return the arguments of a `DataLoader` that choose its data, beside the data set.

    Args:
        dataloader: Loader from which the way of batching is taken.
        indices: Source of indices: a batch sampler, or a sampler where items are not batches; None for an
            iterable data set.
    """
    if indices is None:
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {"batch_size": None, "sampler": indices}
    return {"batch_sampler": indices}
