"""Gathering of per-batch results, so that every sample of the data set counts once."""

from __future__ import annotations

import contextlib
import numbers
import pickle
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_launcher.training import operations
from notebook_launcher.training.operations.checking import DistributedOperationException, Pickled, agree, by_rank_text
from notebook_launcher.training.operations.collectives import gather_agreed, put_back, row_form, world_size
from notebook_launcher.training.operations.nested import find_leaves, is_container, rebuild
from notebook_launcher.training.user_warnings import warn_user
from notebook_launcher.wording import describe_value, plural, plural_verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_launcher.training.data.rows import Round


def gather_for_metrics(data: Any, loader: Any, *, use_gather_object: bool = False, copies: int = 1) -> Any:
    """Gather `data` of all ranks, in the order of the data set, without samples that were repeated.

    Args:
        data: Tensors with a row for each sample of this rank's batch; lists or tuples of objects, one for each
            sample; arrays of NumPy with such rows; also beside each other in mappings, dataclasses and tuples, and in
            lists that hold tensors alone or fewer parts than there are samples. What has another length, such as a
            mean loss, belongs to the batch as a whole: it is gathered, and left out only of ranks that had no sample
            of their own. A text, or another object that is neither a number nor in a list, must be equal on all
            ranks, and stays as it is. Lists, and lists of mappings of tensors, with as many items as each rank has
            samples have an item for each sample, unless an earlier round of the loop had other lengths; where both
            readings are possible, a warning says which was taken.
        loader: The prepared loader that the batch came from; None: nothing is left out.
        use_gather_object: True to gather a list of objects even if they are tensors.
        copies: Number of neighbouring ranks that read the same data; the first of them counts.

    Returns:
        The same structure on every rank. Lists of objects are joined into one.

    Raises:
        TypeError: Objects cannot be pickled; on all ranks.
        DistributedOperationException: Names, dtypes or shapes, but for dimension 0, differ, or objects that are in no
            list; on all ranks.
    """
    counts = None if loader is None else loader.current_round
    if counts is not None and 0 in counts.weights:
        loader.repeat_is_known = True
    if counts is not None and len(counts.rows) * copies != world_size():
        counts = None
    if counts is not None and copies > 1:
        counts = counts.spread(copies)
    return _gather(data, counts, loader, as_objects=use_gather_object)


def _gather(data: Any, counts: Round | None, loader: Any, *, as_objects: bool) -> Any:
    if world_size() == 1:
        return data
    if as_objects:
        rows = list(data) if isinstance(data, torch.Tensor) and data.ndim else _items(data)
        return _join_items(operations.gather_object([rows]), counts)
    marked = _mark(data, () if counts is None else counts.rows, loader)
    leaves = list(find_leaves(marked))
    results: dict[int, Any] = gather_agreed(
        agree("gather_for_metrics", leaves, row_form),
        # One without dimensions is no sample's.
        lambda each: [
            abs(rows) for rows in _counting(each.lengths if each.tensor.ndim else [-1] * len(each.lengths), counts)
        ],
    )
    objects = [(at, path, leaf.part) for at, (path, leaf) in enumerate(leaves) if isinstance(leaf, Pickled)]
    if objects:
        mine = {path: operations.send_to_device(part, "cpu") for _, path, part in objects}
        by_rank = operations.gather_object([mine])
        for at, path, part in objects:
            joined = _join([theirs[path] for theirs in by_rank], counts, loader, path)
            device = operations.find_device(part)
            results[at] = joined if device is None else operations.send_to_device(joined, device)
    return put_back(marked, results)


def _mark(data: Any, rows: Sequence[int], loader: Any) -> Any:
    """Return `data` with every part that is to be sent as objects in a `Pickled`.

    A list holds an object for each sample, unless it holds tensors alone. So does a tuple of objects. A tuple of
    lists, and a list of as many mappings as a rank has samples, are not taken apart here: only the lengths on all
    ranks tell whether they have an item for each sample.

    Args:
        data: This rank's results.
        rows: Samples in each rank's batch; empty if that is unknown.
        loader: The loader, which knows if there were mappings of rows in an earlier round; their lists may have as many
            items as a last, short batch.
    """
    if data is None or isinstance(data, torch.Tensor):
        return data
    is_named = isinstance(data, tuple) and hasattr(data, "_fields")
    if isinstance(data, (list, tuple)) and not is_named:
        tensors = list(operations.find_tensors(data))
        if not tensors:
            return Pickled(data)
        if rows and all(isinstance(item, Mapping) for item in data):
            are_rows = all(tensor.ndim and len(tensor) == rows[dist.get_rank()] for tensor in tensors)
            if len(data) in rows and not (loader.gathers_parts and are_rows):
                return Pickled(data)
            loader.gathers_parts |= are_rows
        is_structure = _only_tensors(data) or (
            isinstance(data, tuple) and any(isinstance(item, (list, torch.Tensor)) for item in data)
        )
    else:
        is_structure = is_container(data)
    return rebuild(data, lambda part: _mark(part, rows, loader)) if is_structure else Pickled(data)


def _only_tensors(data: Any) -> bool:
    return all(leaf is None or isinstance(leaf, torch.Tensor) or is_container(leaf) for _, leaf in find_leaves(data))


def _items(data: Any) -> list[Any]:
    return list(data) if isinstance(data, (list, tuple)) or _has_rows(data) else [data]


def _has_rows(data: Any) -> bool:
    """Return True for an array of NumPy with dimensions; NumPy is not imported for it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(data, numpy.ndarray) and data.ndim > 0


def _join(by_rank: list[Any], counts: Round | None, loader: Any, path: str) -> Any:
    """Return the objects of all ranks, of each sample once, as a list, tuple or array like each rank's."""
    first = by_rank[0]
    if _is_structure(by_rank, counts) or (
        counts is not None
        and (_is_list_of_parts(by_rank, counts, loader) or _are_columns(by_rank, counts, loader, path))
    ):
        parts = enumerate(zip(*by_rank, strict=True))
        return type(first)(_join(list(part), counts, loader, f"{path}[{at}]") for at, part in parts)
    if all(isinstance(part, Mapping) and part.keys() == first.keys() for part in by_rank):
        joined = iter([_join([part[key] for part in by_rank], counts, loader, f"{path}[{key!r}]") for key in first])
        return rebuild(first, lambda _: next(joined))
    if all(isinstance(part, torch.Tensor) for part in by_rank):
        kept = map(abs, _counting([len(part) if part.ndim else -1 for part in by_rank], counts))
        pairs = zip(by_rank, kept, strict=True)
        return torch.cat([(part if part.ndim else part[None])[:length] for part, length in pairs])
    return _join_items(by_rank, counts, path)


def _join_items(by_rank: list[Any], counts: Round | None, path: str = "value") -> Any:
    kept = _counting([len(_items(part)) for part in by_rank], counts)
    if all(_has_rows(part) and part.shape[1:] == by_rank[0].shape[1:] for part in by_rank):
        return sys.modules["numpy"].concatenate([part[:length] for part, length in zip(by_rank, kept, strict=True)])
    if not any(isinstance(part, (list, tuple, numbers.Number)) or hasattr(part, "dtype") for part in by_rank):
        return _one_of({rank: part for rank, part in enumerate(by_rank) if kept[rank]}, path)
    joined = [item for part, length in zip(by_rank, kept, strict=True) for item in _items(part)[:length]]
    return tuple(joined) if all(isinstance(part, tuple) for part in by_rank) else joined


def _one_of(objects: dict[int, Any], path: str) -> Any:
    """Return what is the same object on all ranks; raise DistributedOperationException if it differs."""
    first = next(iter(objects.values()))
    if all(_is_same(each, first) for each in objects.values()):
        return first
    found = by_rank_text({rank: describe_value(each) for rank, each in objects.items()})
    raise DistributedOperationException(
        f"gather_for_metrics got, as {path}, {found}: an object that is in no list belongs to the batch as a whole, "
        "and must be equal on all ranks. Put it into a list, [...], to get a list of all ranks' objects."
    )


def _is_same(one: Any, other: Any) -> bool:
    if pickle.dumps(one) == pickle.dumps(other):
        return True
    with contextlib.suppress(Exception):  # A user's comparison.
        return bool(one == other)
    return False


def _are_columns(by_rank: list[Any], counts: Round, loader: Any, path: str) -> bool:
    """Return True for lists of mappings of tensors that have no item for each sample, as of several views of them."""
    if not all(isinstance(part, (list, tuple)) and len(part) == len(by_rank[0]) for part in by_rank):
        return False
    if not all(isinstance(item, Mapping) for part in by_rank for item in part) or not _only_tensors(by_rank):
        return False
    pairs = list(zip(by_rank, counts.rows, strict=True))
    if any(len(part) != rows for part, rows in pairs):
        loader.gathers_parts = True
        return True
    if all(each.ndim and len(each) == rows for part, rows in pairs for each in operations.find_tensors(part)):
        warn_user(
            f"gather_for_metrics() got, as {path}, {plural(len(by_rank[0]), 'mapping')}, as many as each rank has "
            "samples, and joins them as one for each sample. If instead their tensors have a row for each sample, "
            "pass a dict of mappings."
        )
    return False


def _is_structure(by_rank: list[Any], counts: Round | None) -> bool:
    """Return True for tuples of lists (or arrays) with an item for each sample, not of a list for each sample."""
    if not all(isinstance(part, tuple) and len(part) == len(by_rank[0]) for part in by_rank):
        return False
    lengths = [[len(item) for item in part if isinstance(item, list) or _has_rows(item)] for part in by_rank]
    if not lengths[0] or counts is None:
        return bool(lengths[0])
    fits = all(set(lists) == {rows} for lists, rows in zip(lengths, counts.rows, strict=True))
    return fits or any(len(part) != rows for part, rows in zip(by_rank, counts.rows, strict=True))


def _is_list_of_parts(by_rank: list[Any], counts: Round, loader: Any) -> bool:
    """Return True for lists of few parts that have an item for each sample each, such as `[predictions, targets]`.

    A list that is as long as the batch has an item for each sample, unless an earlier round of the loop had such parts.
    """
    if not all(type(part) is list and len(part) == len(by_rank[0]) > 0 for part in by_rank):
        return False
    pairs = list(zip(by_rank, counts.rows, strict=True))
    if not all(_num_items(item) == rows for part, rows in pairs for item in part):
        return False
    if any(len(part) < rows for part, rows in pairs):
        loader.gathers_parts = True
    elif not loader.gathers_parts and any(len(part) != rows for part, rows in pairs):
        warn_user(
            f"gather_for_metrics() got a list of {len(by_rank[0])} lists with an item for each sample, and joins their "
            "items as if each list were of one sample. To gather the lists beside each other, pass a tuple or a dict."
        )
    return bool(loader.gathers_parts)


def _num_items(value: Any) -> int:
    has_rows = isinstance(value, list) or _has_rows(value) or (isinstance(value, torch.Tensor) and value.ndim)
    return len(value) if has_rows else -1


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
