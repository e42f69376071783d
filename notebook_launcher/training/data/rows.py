"""Rows of a collated batch, which are its samples: counting, finding, taking, joining.

A sample is an element along dimension 0 of every tensor that is as long as the batch, and an item of every list with
an item for each sample: names, numbers, dictionaries, boxes of images. Anything else belongs to the batch as a whole.

A list of two items in a batch of two samples may have an item for each, as `[{"id": 0}, {"id": 1}]`, or hold two parts
of the batch, as `[x, y]` does. `find_row_lists` tells them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from notebook_launcher.training.operations import find_batch_size
from notebook_launcher.training.operations.nested import is_container, named_parts, rebuild
from notebook_launcher.wording import type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


PLAIN = (str, bytes, int, float, complex, bool, type(None))
"""Types of values that belong to a batch as a whole, such as the name of a task."""


class RowLists(NamedTuple):
    """The result of `find_row_lists`."""

    paths: frozenset[str]
    """The paths of lists with an item for each sample."""
    fits: bool
    """True if all other tensors have a row for each sample or no dimensions, and there is nothing but plain values
    beside."""


def find_rows(batch: Any) -> int | None:
    """Return the number of samples; None if it cannot be known.

    Tensors in inner lists are asked last: they may be a tensor for each sample.
    """
    outer = next(_outer_lengths(batch, is_outermost=True), None)
    if outer is not None:
        return outer
    flat = next((len(part) for _, part in _leaves(batch) if _is_flat_list(part)), None)
    return find_batch_size(batch) if flat is None else flat


def _outer_lengths(batch: Any, *, is_outermost: bool) -> Iterator[int]:
    if isinstance(batch, torch.Tensor):
        yield from batch.shape[:1]
    elif is_container(batch) and (is_outermost or type(batch) not in (list, tuple)):
        for _, part in named_parts(batch):
            yield from _outer_lengths(part, is_outermost=False)


def is_list_of_samples(batch: Any) -> bool:
    """Return True for a list of mappings or tuples, which a data set that makes batches ready may give."""
    return type(batch) is list and len(batch) > 0 and all(isinstance(sample, (Mapping, tuple)) for sample in batch)


def find_row_lists(batch: Any, num_rows: int, samples: Sequence[Any] = ()) -> RowLists:
    """Find the lists, and tuples, of a batch that have an item for each of its samples.

    They are known by what they hold: an item that was part of sample 0, then one of sample 1 and so on, of the
    `samples` that `collate_fn` got; or, made by `collate_fn`, items of one kind that are not themselves parts of the
    batch with `num_rows` rows each.
    """
    owners: dict[int, int | None] = {}
    for at, sample in enumerate(samples):
        for held in _held(sample):
            owners[id(held)] = at if owners.get(id(held), at) == at else None
    paths: set[str] = set()
    fits = True

    def walk(part: Any, path: str) -> None:
        nonlocal fits
        if isinstance(part, torch.Tensor):
            # A sample's own tensor outside of a list of them, as where there is but one.
            fits = fits and (part.ndim == 0 or part.shape[0] == num_rows) and id(part) not in owners
        elif not is_container(part):
            fits = fits and isinstance(part, PLAIN)
        elif type(part) in (list, tuple) and len(part) == num_rows and (kind := _kind(part, owners, path)) != "parts":
            paths.add(path)
            fits = fits and kind == "rows"
        elif _is_flat_list(part):
            fits = False
        else:
            for step, inner in named_parts(part):
                walk(inner, path + step)

    walk(batch, "batch")
    return RowLists(frozenset(paths), fits)


def _held(value: Any) -> Iterator[Any]:
    """Yield the containers, tensors and objects of a sample; plain values may be one object in several samples."""
    if is_container(value):
        # An empty tuple is one object, too.
        parts = named_parts(value)
        yield from [value] if parts else []
        for _, part in parts:
            yield from _held(part)
    elif not isinstance(value, PLAIN):
        yield value


def _kind(items: Any, owners: dict[int, int | None], path: str) -> str:
    """Return `rows` if a list has an item for each sample, `parts` if it holds parts of the batch, or `unsure`."""
    found = [{owners[id(held)] for held in _held(item) if id(held) in owners} - {None} for item in items]
    if any(found):
        return "rows" if all(each <= {at} for at, each in enumerate(found)) else "parts"
    if _is_flat_list(items):
        return "rows"
    is_outermost, is_tuple = path == "batch", isinstance(items, tuple)
    have_rows = [_is_part(item, len(items)) for item in items]
    if all(have_rows):
        if is_outermost or is_tuple:
            return "rows" if all(isinstance(item, Mapping) for item in items) else "parts"
        return "unsure" if len(items) > 1 and isinstance(items[0], torch.Tensor) else "rows"
    if any(have_rows) and (is_outermost or is_tuple):
        return "parts"
    kinds = {(type(item), getattr(item, "ndim", 0)) for item in items if item is not None}
    return "rows" if len(kinds) == 1 or not (is_outermost or is_tuple or any(have_rows)) else "parts"


def _is_part(item: Any, num_rows: int) -> bool:
    """Return True if all that a value holds has so many rows."""
    if isinstance(item, torch.Tensor):
        return item.ndim > 0 and item.shape[0] == num_rows
    if _is_flat_list(item):
        return len(item) == num_rows
    parts = named_parts(item) if is_container(item) else []
    return bool(parts) and all(_is_part(part, num_rows) for _, part in parts)


def take_rows(batch: Any, start: int, stop: int, num_rows: int, lists: frozenset[str] = frozenset()) -> Any:
    """Return the samples from `start` to `stop` of a batch of `num_rows`, in its structure.

    `lists` are the paths of lists with an item for each sample, beside those that hold plain values alone. A part that
    can be moved to a device, so that it holds tensors, and is of a type that cannot be cut, is a TypeError.
    """

    def take(part: Any, path: str) -> Any:
        if isinstance(part, torch.Tensor):
            return part[start:stop] if part.ndim and part.shape[0] == num_rows else part
        if path in lists or _is_flat_list(part):
            return part[start:stop] if len(part) == num_rows else part
        if is_container(part):
            return _rebuild(part, path, take)
        if hasattr(part, "to"):
            raise TypeError(
                f"A batch holds a {type(part).__name__}, which cannot be cut into parts for the ranks. Pass "
                "slice_fn_for_dispatch=, or dispatch_batches=False so that every rank reads the data itself."
            )
        return part

    return take(batch, "batch")


def values_of_batch(batch: Any, num_rows: int, lists: frozenset[str]) -> dict[str, Any]:
    """Return, by their paths, the numbers, texts and tensors that belong to a batch as a whole."""
    found: dict[str, Any] = {}
    for path, part in _leaves(batch, lists):
        if not isinstance(part, torch.Tensor):
            if path not in lists and not _is_flat_list(part):
                found[path] = part
        elif part.ndim == 0 or part.shape[0] != num_rows:
            found[path] = part.tolist()
    return found


def _leaves(batch: Any, lists: frozenset[str] = frozenset(), path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the parts of a batch that are cut or kept as one, with their paths."""
    if path in lists or _is_flat_list(batch) or not is_container(batch):
        yield path, batch
    else:
        for step, inner in named_parts(batch):
            yield from _leaves(inner, lists, path + step)


def _rebuild(container: Any, path: str, func: Callable[[Any, str], Any]) -> Any:
    """Return a container like this one, with `func` of each of its parts and their paths."""
    steps = iter(named_parts(container))
    return rebuild(container, lambda part: func(part, path + next(steps)[0]))


def join_batches(batches: Sequence[Any], lists: frozenset[str] = frozenset(), path: str = "batch") -> Any:
    """Return one batch with the samples of all batches; `lists` as for `take_rows`, and `path` that of these parts.

    What is neither a tensor, a list nor a plain object, or has other parts in some batches, is a TypeError.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches)) if first.ndim else first
    if path in lists or _is_flat_list(first):
        return type(first)(item for batch in batches for item in batch)
    if is_container(first):
        by_batch = [dict(named_parts(batch)) if is_container(batch) else {} for batch in batches]
        if any(parts.keys() != by_batch[0].keys() for parts in by_batch):
            raise TypeError(f"batches that hold {type_of(first)} with other parts in some cannot be joined.")
        return _rebuild(
            first, path, lambda _, inner: join_batches([parts[inner[len(path) :]] for parts in by_batch], lists, inner)
        )
    if isinstance(first, PLAIN):
        return first
    raise TypeError(
        f"batches that hold {type_of(first)} cannot be joined to be shared out. Let collate_fn return tensors or lists "
        "in its place, or pass dispatch_batches=False so that every rank reads the data itself."
    )


def _is_flat_list(part: Any) -> bool:
    return type(part) in (list, tuple) and len(part) > 0 and all(isinstance(item, PLAIN) for item in part)


# --------------------------------------------------------------------------------------------------------------------
# Rounds, which are the batches that all ranks get at once.


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One round: every rank's batch, counted in samples, in rank order."""

    rows: tuple[int, ...]
    """Samples in each rank's batch, also samples that were added to even it out."""
    real: tuple[int, ...]
    """Samples of each batch that no rank has had before; they come first, and `gather_for_metrics` keeps them."""
    weights: tuple[int, ...]
    """The batch's weight in a window's mean: `rows`, or 0 for a batch that only keeps step."""

    def spread(self, copies: int) -> Round:
        """Return the round in which `copies` neighbouring ranks have the same batch, real on the first of them."""
        rows = tuple(count for count in self.rows for _ in range(copies))
        real = tuple(count if copy == 0 else 0 for count in self.real for copy in range(copies))
        return Round(rows, real, tuple(weight for weight in self.weights for _ in range(copies)))


def uneven_error(what: str) -> ValueError:
    """Return the error of `uneven="error"`; `what` lists the ranks' numbers of batches."""
    return ValueError(
        f'The ranks would have different numbers of batches ({what}), with even_batches=False and uneven="error". '
        'Write uneven="weigh" to use all samples, each once; uneven="stop" or drop_last=True to leave the last '
        "out; or even_batches=True to repeat some."
    )


def check_split(size: int | None, num_processes: int, lacking: str) -> None:
    """Raise ValueError unless a batch can be cut into equal parts for all ranks; `lacking` says what has no size."""
    if size is None:
        raise ValueError(
            f"split_batches=True cuts every batch among the ranks, and their size is not known: {lacking}. Give a "
            "batch_size, or pass split_batches=False."
        )
    if size % num_processes != 0:
        raise ValueError(
            f"split_batches=True cuts every batch among {num_processes} ranks, and batch_size={size} is not a round "
            f"multiple of {num_processes}. Use batch_size={-(-size // num_processes) * num_processes}, for instance."
        )


# --------------------------------------------------------------------------------------------------------------------
# Batches with the number of their samples, which rank 0 deals out to all ranks.
#
# A `collate_fn` may return anything: a list of its samples, tuples of images of different sizes, tensors of packed
# texts. So samples are counted where they are still apart, in the process that collates them.


class CountedBatch(NamedTuple):
    """A batch with the number of its samples."""

    batch: Any
    rows: int
    can_be_cut: bool
    """True if every part of the batch has a row for each sample, or belongs to the batch as a whole."""
    lists: frozenset[str] = frozenset()
    """The paths of lists with an item for each sample, of whatever kind."""

    def take(self, start: int, stop: int) -> Any:
        """Return the samples from `start` to `stop`; raise TypeError if the batch cannot be cut."""
        if (start, stop) == (0, self.rows):
            return self.batch
        if not self.can_be_cut:
            raise TypeError(
                f"A batch of {self.rows} samples cannot be cut into parts for the ranks: collate_fn made a "
                f"{type(self.batch).__name__} of which not every part has a row for each sample. Pass "
                "slice_fn_for_dispatch=, or dispatch_batches=False so that every rank reads the data itself."
            )
        return take_rows(self.batch, start, stop, self.rows, self.lists)


def counted(batch: Any) -> CountedBatch:
    """Return a batch of torch's own `collate_fn` with its rows, unless it has been counted already."""
    if isinstance(batch, CountedBatch):
        return batch
    rows = find_rows(batch)
    return CountedBatch(batch, 1 if rows is None else rows, can_be_cut=rows is not None)


def ready_rows(batch: Any) -> int:
    """Return the number of samples of a batch that the data set made ready."""
    return len(batch) if is_list_of_samples(batch) else counted(batch).rows


class CountingCollate:
    """A `collate_fn` that counts the samples that it gets, or that the batches have which the data set makes ready."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_ready: bool = False) -> None:
        self._collate_fn = collate_fn
        self._is_ready = is_ready

    def __call__(self, samples: Any) -> CountedBatch:
        """Collate the samples, or convert the ready batch."""
        batch = self._collate_fn(samples)
        if not self._is_ready:
            lists = find_row_lists(batch, len(samples), samples)
            return CountedBatch(batch, len(samples), can_be_cut=lists.fits, lists=lists.paths)
        if is_list_of_samples(batch):
            return CountedBatch(batch, len(batch), can_be_cut=False)
        rows = find_rows(batch)
        return counted(batch) if rows is None else CountedBatch(batch, rows, True, find_row_lists(batch, rows).paths)
