"""Gathering of per-batch results, so that every sample of the data set counts once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from notebook_launcher.training import operations
from notebook_launcher.training.operations.collectives import world_size
from notebook_launcher.training.operations.nested import map_tensors
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording.counts import plural, plural_verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.data.rounds import Round

__all__ = ["gather_for_metrics"]


def gather_for_metrics(data: Any, loader: Any, *, use_gather_object: bool = False, copies: int = 1) -> Any:
    """Gather `data` of all ranks, in the order of the data set, without samples that were repeated.

    Args:
        data: Tensors with a row for each sample of this rank's batch, also nested; or a list of objects, one
            for each sample; or an array of NumPy, whose rows are such objects. What has another length, such as a
            mean loss, belongs to the batch as a whole: it is gathered, and left out only of ranks that had no sample
            of their own.
        loader: The prepared loader that the batch came from; None: nothing is left out.
        use_gather_object: True to gather a list of objects even if they are tensors.
        copies: Number of neighbouring ranks that read the same data; the first of them counts.

    Returns:
        The same structure on every rank. Lists of objects are joined into one.
    """
    counts = None if loader is None else loader.current_round
    # With ready batches the loader counts batches, whose rows may differ between the ranks.
    may_differ = loader is not None and getattr(loader, "batch_sampler", loader) is None
    if counts is not None and 0 in counts.weights:
        loader.note_repeat()
    if counts is not None and len(counts.rows) * copies != world_size():
        counts = None
    if counts is not None and copies > 1:
        counts = counts.spread(copies)
    return _gather(data, counts, as_objects=use_gather_object, may_differ=may_differ)


def _gather(data: Any, counts: Round | None, *, as_objects: bool, may_differ: bool) -> Any:
    if world_size() == 1:
        return data
    if not as_objects and _only_tensors(data):
        return _gather_tensors(data, counts, may_differ=may_differ)
    if isinstance(data, Mapping) and not as_objects:
        gather_part = functools.partial(_gather, counts=counts, as_objects=False, may_differ=may_differ)
        return operations.nested.rebuild(data, gather_part)
    return _gather_objects(data, counts)


def _has_rows(data: Any) -> bool:
    """Return True for an array of NumPy with dimensions; NumPy is not imported for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(data, numpy.ndarray) and data.ndim > 0


def _only_tensors(data: Any) -> bool:
    try:
        map_tensors("gather_for_metrics", lambda tensor: tensor, data)
    except TypeError:
        return False
    return True


def _gather_tensors(data: Any, counts: Round | None, *, may_differ: bool) -> Any:
    is_even = counts is None or (counts.real == counts.rows and len(set(counts.rows)) == 1)
    if is_even and not may_differ:
        # Whatever has a row for each sample has as many on all ranks, and all of them count.
        return operations.gather(data)
    tensors = list(operations.find_tensors(data))
    lengths = operations.gather(torch.tensor([[len(tensor) if tensor.ndim else -1 for tensor in tensors]]))
    padded = operations.gather(operations.pad_across_processes(data))
    each = iter(lengths.T.tolist())
    return map_tensors("gather_for_metrics", lambda tensor: _keep(tensor, next(each), counts), padded)


def _keep(gathered: torch.Tensor, lengths: list[int], counts: Round | None) -> torch.Tensor:
    """Return the rows of a gathered and padded tensor that count.

    `lengths` are the ranks' own, without padding; -1 for a tensor without dimensions.
    """
    kept = [abs(length) for length in _counting(lengths, counts)]
    padded = len(gathered) // len(lengths)
    return torch.cat([gathered[rank * padded : rank * padded + length] for rank, length in enumerate(kept)])


def _gather_objects(data: Any, counts: Round | None) -> list[Any]:
    mine = list(data) if isinstance(data, (list, tuple)) or _has_rows(data) else [data]
    by_rank: list[list[Any]] = operations.gather_object([mine])
    kept = _counting([len(items) for items in by_rank], counts)
    return [item for items, length in zip(by_rank, kept, strict=True) for item in items[:length]]


def _counting(lengths: list[int], counts: Round | None) -> Sequence[int]:
    """Return how many rows count of each rank's, the first ones, where the ranks have as many as `lengths`."""
    if counts is None:
        return lengths
    if tuple(lengths) == counts.rows:
        return counts.real
    _warn_of_several_rows(lengths, counts)
    return [length if real else 0 for length, real in zip(lengths, counts.real, strict=True)]


def _warn_of_several_rows(lengths: list[int], counts: Round) -> None:
    """Warn if results have several rows for each sample: which of them belong to repeated samples is not known."""
    factor = max(lengths) // max(*counts.rows, 1)
    repeated = sum(rows - real for rows, real in zip(counts.rows, counts.real, strict=True) if real)
    if repeated and factor > 1 and lengths == [factor * rows for rows in counts.rows]:
        warn_user(
            f"gather_for_metrics() got {factor} rows for each sample. {plural(repeated, 'sample')} of this round "
            f"{plural_verb('is', repeated)} there twice, so that every rank has as many, and the rows of the second "
            "time are not left out. Pass one row for each sample, as in gather_for_metrics(outputs.view(len(inputs), "
            f"{factor}, -1)), or set DataLoaderConfiguration(even_batches=False)."
        )
