"""Epoch plans, which ranks compare before an epoch, so that they fail at once and not in step 12."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset, SubsetRandomSampler

from notebook_launcher.training.operations.checking import gather_numbers
from notebook_launcher.training.process.arrivals import meet

__all__ = ["EpochPlan", "agree_on_plan", "rows_of"]

UNKNOWN = -1


class EpochPlan(NamedTuple):
    """The data that a rank will read in an epoch."""

    num_samples: int | None
    """Samples of the data set; None if it has no length."""
    num_batches: int | None
    """Batches of all ranks; None if unknown."""
    epoch: int
    begins_at: int
    """The sample of the epoch at which the rank begins."""
    skip_batches: int
    """Number of its own batches that the rank skips."""
    rows: int
    """Fingerprint of the rows that a `Subset` or a `SubsetRandomSampler` takes; 0 without either."""
    seed: int
    """Seed of a seedable sampler; any number otherwise."""


def agree_on_plan(mine: EpochPlan) -> EpochPlan:
    """Exchange plans, and return the plan with rank 0's seed; every rank must call this.

    Raises:
        RuntimeError: On every rank, if the plans differ in anything but the seed.
    """
    meet("iter(loader)")
    numbers = [UNKNOWN if number is None else number for number in mine]
    # A seed may have 64 bits without a sign.
    numbers[-1] = mine.seed % 2**64 - 2**63
    by_rank = gather_numbers(numbers)
    first = by_rank[0]
    for rank, plan in enumerate(by_rank):
        for at, explanation in enumerate(EXPLANATIONS):
            if plan[at] != first[at]:
                raise RuntimeError(explanation.format(rank=rank, mine=_text(plan[at]), first=_text(first[at])))
    return mine._replace(seed=first[-1] + 2**63)


EXPLANATIONS = (
    (
        "rank {rank}'s data set has {mine} samples, rank 0's {first}: the ranks would see different data and wait "
        "for each other at the end. Give every rank the same data set; prepare() shares it out."
    ),
    (
        "rank {rank}'s loader has {mine} batches, rank 0's {first}: the ranks would wait for each other at the end. "
        "Give every rank a loader of the same batch_size and drop_last."
    ),
    (
        "rank {rank} begins epoch {mine}, rank 0 epoch {first}: the ranks would see different orders. Call "
        "set_epoch(), and leave loops early, on every rank or on none."
    ),
    "rank {rank} begins at sample {mine} of the epoch, rank 0 at {first}: load the same state on every rank.",
    (
        "rank {rank} skips its first {mine} batches, rank 0 {first}: call skip_first_batches() with the same number "
        "on every rank."
    ),
    (
        "rank {rank}'s subset of the data has other rows than rank 0's: rows that one rank holds back for validation "
        "would be trained on by another. Ranks draw random numbers of their own from prepare() on. Split the data "
        "before it, or with a generator: random_split(..., generator=torch.Generator().manual_seed(0))."
    ),
)


def rows_of(dataset: Any, sampler: Any = None) -> int:
    """Return a fingerprint of the rows that a `Subset` or a `SubsetRandomSampler` takes; 0 without either."""
    total = 0
    takers: list[Any] = [sampler] if isinstance(sampler, SubsetRandomSampler) else []
    while isinstance(dataset, Subset):
        takers.append(dataset)
        dataset = dataset.dataset
    for taker in takers:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # A user's own kind of indices.
            rows = torch.as_tensor(taker.indices, dtype=torch.int64, device="cpu").flatten()
            # The sum may run over; what is left of it still depends on each row and its place.
            total += int((rows * torch.arange(1, len(rows) + 1, device="cpu")).sum())
    return total % 2**63


def _text(number: int) -> str:
    return "an unknown number of" if number == UNKNOWN else str(number)
