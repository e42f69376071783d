"""One rank's batches as indices, each with its round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.data.samplers import count_samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Share", "rest_of", "shares_of"]


class Share(NamedTuple):
    """One rank's batch of a round."""

    indices: Any
    """The rank's indices; None: it has none, and its iteration is over."""
    round: Round
    samples: int
    """Samples of the epoch that all ranks together have had, with this round."""


def shares_of(batch_sampler: Any, skip: int = 0) -> Iterator[Share]:
    """Return the shares of a batch sampler that is shared out; of any other, all its batches.

    Args:
        batch_sampler: Whose; or a sampler, whose items then count one sample each.
        skip: How many samples of the epoch have been had. A batch of which only a part is left comes as that.
    """
    if hasattr(batch_sampler, "shares"):
        shares: Iterator[Share] = batch_sampler.shares(skip)
        return shares
    return _unshared(batch_sampler, skip)


def _unshared(batch_sampler: Any, skip: int) -> Iterator[Share]:
    known: dict[int, Round] = {}
    for batch in rest_of(batch_sampler, skip):
        count = count_samples(batch)
        skip += count
        yield Share(batch, known.get(count) or known.setdefault(count, Round((count,), (count,), (count,))), skip)


def rest_of(batches: Iterable[Any], skip: int) -> Iterator[Any]:
    """Skip the first `skip` samples."""
    for batch in batches:
        count = count_samples(batch)
        if 0 < count <= skip:
            skip -= count
            continue
        yield batch[skip:] if skip else batch
        skip = 0
