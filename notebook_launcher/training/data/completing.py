"""Completion of a round that has less than a batch for every rank."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.data.sampling.samplers import count_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fill", "keep_step", "uneven_error"]


def fill(parts: list[Any], real: tuple[int, ...], start: Sequence[Any], size: int | None) -> Round:
    """Complete every rank's part, in place, with samples from the epoch's start.

    Args:
        parts: Every rank's indices.
        real: Number of samples in each part.
        start: The epoch's first batches.
        size: Number of samples that every rank needs; None: ranks that have none get whole batches.
    """
    if size is None:
        whole = itertools.cycle(start)
        for rank, count in enumerate(real):
            if not count:
                parts[rank] = next(whole)
    else:
        samples = itertools.cycle(itertools.chain.from_iterable(start))
        for rank, count in enumerate(real):
            if count < size:
                parts[rank] = [*parts[rank], *itertools.islice(samples, size - count)]
    rows = tuple(map(count_samples, parts))
    return Round(rows, real, rows)


def keep_step(parts: list[Any], real: tuple[int, ...], previous: Sequence[Any], *, leave: bool) -> Round:
    """Give ranks without samples their last batch again, in place; with `leave`, None.

    Args:
        parts: Every rank's indices.
        real: Number of samples in each part.
        previous: The round before; empty in the first, where such ranks get another's batch.
        leave: True if such ranks end here.
    """
    another = next(part for part, count in zip(parts, real, strict=True) if count)
    for rank, count in enumerate(real):
        if not count:
            parts[rank] = None if leave else previous[rank] if previous else another
    return Round(tuple(0 if part is None else count_samples(part) for part in parts), real, real)


def uneven_error(what: str) -> ValueError:
    """Return the error of `uneven="error"`; `what` lists the ranks' numbers of batches."""
    return ValueError(
        f'The ranks would have different numbers of batches ({what}), with even_batches=False and uneven="error". '
        'Write uneven="weigh" to use all samples, each once; uneven="stop" or drop_last=True to leave the last '
        "out; or even_batches=True to repeat some."
    )
