"""A batch sampler that remembers the round of each batch, for the loader that fetches with it.

torch takes indices in the main process, with and without workers, sooner than it hands out the batches that
are loaded for them, and in the same order. So the rounds wait here for their batches.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from notebook_launcher.training.data.position import Order, generator_owners
from notebook_launcher.training.data.samplers import links_of
from notebook_launcher.training.data.shares import Share, shares_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher.training.data.rounds import Round

__all__ = ["Walk", "WalkedSampler"]


class Walk:
    """One walk through a batch sampler, a batch ahead of the loader, so that the last batch is known as such."""

    def __init__(self, batch_sampler: Any, skip: int, order: Order | None) -> None:
        self.order = order
        """The states that made the order; None until the first batch is drawn."""
        self.taken: collections.deque[tuple[Round, int, bool]] = collections.deque()
        """For each batch that is being loaded: its round, the samples so far, and True if it is the last."""
        self._batch_sampler = batch_sampler
        self._skip = skip
        self._shares: Iterator[Share] | None = None
        self._ahead: Share | None = None

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> Any:
        if self._shares is None:
            self._start()
        share = self._ahead
        if share is None:
            raise StopIteration
        self._step()
        indices, drawn, samples = share
        self.taken.append((drawn, samples, self._ahead is None))
        return indices

    def _start(self) -> None:
        self._shares = shares_of(self._batch_sampler, self._skip)
        owners = generator_owners(links_of(self._batch_sampler))
        if self.order is not None:
            with self.order.replayed(owners):
                self._step()
        else:
            self.order = Order.capture(owners)
            self._step()

    def _step(self) -> None:
        assert self._shares is not None
        self._ahead = next(self._shares, None)
        if self._ahead is not None and self._ahead.indices is None:
            # The other ranks have one batch more.
            self._ahead = None


class WalkedSampler:
    """The batch sampler of the fetching loader: every iteration is a new `Walk`."""

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self._skip = 0
        self._order: Order | None = None
        self._newest: Walk | None = None

    def begin_at(self, skip: int, order: Order | None) -> None:
        """Skip the first `skip` samples of the order that `order` makes, from now on."""
        self._skip = skip
        self._order = order

    def take_walk(self) -> Walk:
        """Return the walk of the iteration that has just begun."""
        walk, self._newest = self._newest, None
        assert walk is not None
        return walk

    def __iter__(self) -> Walk:
        # A loader with workers asks twice, and uses the second.
        self._newest = Walk(self._batch_sampler, self._skip, self._order)
        return self._newest

    def __len__(self) -> int:
        return len(self._batch_sampler)
