"""A batch sampler that remembers the round of each batch, for the loader that fetches with it.

torch takes indices in the main process, with and without workers, sooner than it hands out the batches that
are loaded for them, and in the same order. So the rounds wait here for their batches.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from notebook_launcher.training.data.position import Order, generator_owners
from notebook_launcher.training.data.sampling.samplers import SeedableRandomSampler, links_of
from notebook_launcher.training.data.sampling.sharding import BatchSamplerShard
from notebook_launcher.training.data.sampling.shares import Stretch, stretches_of
from notebook_launcher.training.data.sampling.skipping import SkipBatchSampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.training.data.rounds import Round

__all__ = ["Walk", "WalkedSampler"]


DRAW_NOTHING = (range, SequentialSampler, DistributedSampler, SeedableRandomSampler, BatchSampler, BatchSamplerShard,
                SkipBatchSampler)  # fmt: skip
"""Samplers whose order depends on no generator, or on a seed that they hold."""
DRAW_FROM_THEIR_OWN = (RandomSampler, WeightedRandomSampler)
"""Samplers that draw from their `generator`, if they have one."""


class Taken(NamedTuple):
    """Neighbouring batches that are being loaded."""

    num_batches: int
    round: Round
    """A round that stands for each of theirs."""
    samples: int
    """Samples of the epoch before them."""
    ends: bool
    """True for the last batch, which is alone."""


class Walk:
    """One walk through a batch sampler, a stretch ahead of the loader, so that the last batch is known as such."""

    def __init__(self, batch_sampler: Any, skip: int, order: Order | None) -> None:
        self.order = order
        """The states that made the order; None until the first batch is drawn."""
        self.taken: collections.deque[Taken] = collections.deque()
        """Batches whose indices torch has taken and that it has not handed out yet, the oldest first."""
        self._batch_sampler = batch_sampler
        self._skip = skip

    def indices(self) -> Iterator[Any]:
        """Yield what the loader fetches, and note it in `taken`."""
        stretches = stretches_of(self._batch_sampler, self._skip)
        ahead = self._start(stretches)
        while ahead is not None:
            batches, drawn, samples = ahead
            before_last = len(batches) - 1
            if before_last:
                self.taken.append(Taken(before_last, drawn, samples, ends=False))
                yield from batches[:-1]
            # Not sooner: what draws the indices may count the epoch on where they end.
            ahead = _following(stretches)
            self.taken.append(Taken(1, drawn, samples + before_last * sum(drawn.real), ends=ahead is None))
            yield batches[-1]

    def rounds(self, fetched: Iterator[Any]) -> Iterator[tuple[Taken, Iterator[Any]]]:
        """Yield what was taken with its batches, as the loader hands them out; take all batches before the next."""
        for first in fetched:
            taken = self.taken.popleft()
            yield taken, itertools.chain((first,), itertools.islice(fetched, taken.num_batches - 1))

    def _start(self, stretches: Iterator[Stretch]) -> Stretch | None:
        links = links_of(self._batch_sampler)
        owners = generator_owners(links)
        if self.order is not None:
            with self.order.replayed(owners):
                return _following(stretches)
        self.order = Order.capture(owners, with_defaults=draws_from_defaults(links))
        return _following(stretches)


def draws_from_defaults(links: Iterable[Any]) -> bool:
    """Return False if these samplers are known to draw nothing from the default generators.

    Reading the states of the default generators takes 60 to 100 µs at each epoch.
    """
    return any(
        type(link) not in DRAW_NOTHING
        and not (type(link) in DRAW_FROM_THEIR_OWN and getattr(link, "generator", None) is not None)
        for link in links
    )


def _following(stretches: Iterator[Stretch]) -> Stretch | None:
    ahead = next(stretches, None)
    # A rank without indices is at its end; the other ranks have one batch more.
    return None if ahead is None or ahead.batches[0] is None else ahead


class WalkedSampler:
    """The batch sampler of the fetching loader: every iteration is a new `Walk`."""

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self._skip = 0
        """Samples of the next walk that are skipped."""
        self._order: Order | None = None
        """The states that make the order of the next walk; None: a new order."""
        self._newest: Walk | None = None
        """The walk of the iteration that began last, until it is taken."""

    def begin_at(self, skip: int, order: Order | None) -> None:
        """Skip the first `skip` samples of the order that `order` makes, from now on."""
        self._skip = skip
        self._order = order

    def take_walk(self) -> Walk:
        """Return the walk of the iteration that has just begun."""
        walk, self._newest = self._newest, None
        assert walk is not None
        return walk

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks twice, and uses the second.
        self._newest = Walk(self._batch_sampler, self._skip, self._order)
        return self._newest.indices()

    def __len__(self) -> int:
        return len(self._batch_sampler)
