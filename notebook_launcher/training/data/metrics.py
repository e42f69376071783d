"""Gathering of per-batch results, so that every sample of the data set counts once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training import operations
from notebook_launcher.training.operations.checking import Agreed, Pickled, agree
from notebook_launcher.training.operations.collectives import gather_agreed, put_back, row_form, world_size
from notebook_launcher.training.operations.nested import find_leaves, is_container, rebuild
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import plural, plural_verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.data.rows import Round

__all__ = ["gather_for_metrics"]


def gather_for_metrics(data: Any, loader: Any, *, use_gather_object: bool = False, copies: int = 1) -> Any:
    """Gather `data` of all ranks, in the order of the data set, without samples that were repeated.

    Args:
        data: Tensors with a row for each sample of this rank's batch; lists or tuples of objects, one for each
            sample; arrays of NumPy with such rows; also beside each other in mappings, dataclasses and tuples, and
            tensors in lists, too. What has another length, such as a mean loss, belongs to the batch as a whole: it
            is gathered, and left out only of ranks that had no sample of their own.
        loader: The prepared loader that the batch came from; None: nothing is left out.
        use_gather_object: True to gather a list of objects even if they are tensors.
        copies: Number of neighbouring ranks that read the same data; the first of them counts.

    Returns:
        The same structure on every rank. Lists of objects are joined into one.

    Raises:
        TypeError: Objects cannot be pickled; on all ranks.
        DistributedOperationException: Names, dtypes or shapes, but for dimension 0, differ; on all ranks.
    """
    counts = None if loader is None else loader.current_round
    if counts is not None and 0 in counts.weights:
        loader.note_repeat()
    if counts is not None and len(counts.rows) * copies != world_size():
        counts = None
    if counts is not None and copies > 1:
        counts = counts.spread(copies)
    return _gather(data, counts, as_objects=use_gather_object)


def _gather(data: Any, counts: Round | None, *, as_objects: bool) -> Any:
    if world_size() == 1:
        return data
    if as_objects:
        return _join_items(operations.gather_object([_items(data)]), counts)
    marked = _mark(data, None if counts is None else counts.rows[dist.get_rank()])
    leaves = list(find_leaves(marked))
    results: dict[int, Any] = gather_agreed(
        agree("gather_for_metrics", leaves, row_form), lambda each: _counting_rows(each, counts)
    )
    objects = [(at, path, leaf.part) for at, (path, leaf) in enumerate(leaves) if isinstance(leaf, Pickled)]
    if objects:
        mine = {path: operations.send_to_device(part, "cpu") for _, path, part in objects}
        by_rank = operations.gather_object([mine])
        for at, path, part in objects:
            joined, device = _join([theirs[path] for theirs in by_rank], counts), operations.find_device(part)
            results[at] = joined if device is None else operations.send_to_device(joined, device)
    return put_back(marked, results)


def _mark(data: Any, num_rows: int | None) -> Any:
    """Return `data` with every part that is to be sent as objects in a `Pickled`.

    A list holds an object for each sample, unless it holds tensors alone. So does a tuple of objects. A tuple of
    lists, and a list of as many mappings as there are samples, are not taken apart here: only the lengths on all
    ranks tell whether they have an item for each sample.

    Args:
        data: This rank's results.
        num_rows: Samples in its batch; None if that is unknown.
    """
    if data is None or isinstance(data, torch.Tensor):
        return data
    is_named = isinstance(data, tuple) and hasattr(data, "_fields")
    if isinstance(data, (list, tuple)) and not is_named:
        tensors = list(operations.find_tensors(data))
        if not tensors:
            return Pickled(data)
        if len(data) == num_rows and all(isinstance(item, Mapping) for item in data):
            return Pickled(data)
        is_structure = _only_tensors(data) or (
            isinstance(data, tuple) and any(isinstance(item, (list, torch.Tensor)) for item in data)
        )
        return _mark_parts(data, num_rows) if is_structure else Pickled(data)
    return _mark_parts(data, num_rows) if is_container(data) else Pickled(data)


def _mark_parts(data: Any, num_rows: int | None) -> Any:
    return rebuild(data, lambda part: _mark(part, num_rows))


def _only_tensors(data: Any) -> bool:
    return all(leaf is None or isinstance(leaf, torch.Tensor) or is_container(leaf) for _, leaf in find_leaves(data))


def _items(data: Any) -> list[Any]:
    return list(data) if isinstance(data, (list, tuple)) or _has_rows(data) else [data]


def _has_rows(data: Any) -> bool:
    """Return True for an array of NumPy with dimensions; NumPy is not imported for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(data, numpy.ndarray) and data.ndim > 0


def _join(by_rank: list[Any], counts: Round | None) -> Any:
    """Return the objects of all ranks, of each sample once, as a list, tuple or array like each rank's."""
    first = by_rank[0]
    if _is_structure(by_rank, counts):
        return tuple(_join(list(parts), counts) for parts in zip(*by_rank, strict=True))
    if all(isinstance(part, Mapping) and part.keys() == first.keys() for part in by_rank):
        joined_parts = iter([_join([part[key] for part in by_rank], counts) for key in first])
        return rebuild(first, lambda _: next(joined_parts))
    if counts is not None and _are_columns(by_rank, counts):
        real = zip(by_rank, counts.real, strict=True)
        return operations.concatenate([operations.slice_tensors(part, slice(length)) for part, length in real])
    return _join_items(by_rank, counts)


def _join_items(by_rank: list[Any], counts: Round | None) -> Any:
    kept = _counting([len(_items(part)) for part in by_rank], counts)
    if all(_has_rows(part) and part.shape[1:] == by_rank[0].shape[1:] for part in by_rank):
        return sys.modules["numpy"].concatenate([part[:length] for part, length in zip(by_rank, kept, strict=True)])
    joined = [item for part, length in zip(by_rank, kept, strict=True) for item in _items(part)[:length]]
    return tuple(joined) if all(isinstance(part, tuple) for part in by_rank) else joined


def _are_columns(by_rank: list[Any], counts: Round) -> bool:
    """Return True for lists of mappings whose tensors all have a row for each sample, as of several views of them."""
    if not all(isinstance(item, Mapping) for part in by_rank for item in _items(part)):
        return False
    tensors = [list(operations.find_tensors(part)) for part in by_rank]
    return all(
        rows > 1 and found and _only_tensors(part) and all(each.ndim and len(each) == rows for each in found)
        for part, found, rows in zip(by_rank, tensors, counts.rows, strict=True)
    )


def _is_structure(by_rank: list[Any], counts: Round | None) -> bool:
    """Return True for tuples of lists (or arrays) with an item for each sample, not of a list for each sample."""
    if not all(isinstance(part, tuple) and len(part) == len(by_rank[0]) for part in by_rank):
        return False
    lengths = [[len(item) for item in part if isinstance(item, list) or _has_rows(item)] for part in by_rank]
    if not lengths[0] or counts is None:
        return bool(lengths[0])
    fits = all(set(lists) == {rows} for lists, rows in zip(lengths, counts.rows, strict=True))
    return fits or any(len(part) != rows for part, rows in zip(by_rank, counts.rows, strict=True))


def _counting_rows(each: Agreed, counts: Round | None) -> list[int]:
    """Return how many rows of a tensor count of each rank's; one without dimensions is no sample's."""
    lengths = each.lengths if each.tensor.ndim else [-1] * len(each.lengths)
    return [abs(length) for length in _counting(lengths, counts)]


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
