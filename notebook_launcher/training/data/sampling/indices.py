"""The indices that torch's own samplers draw, as tensors: a sampler's list of 10^8 Python integers takes 4 GB.

The numbers, their order, and what is drawn from which generator equal the samplers' `__iter__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from notebook_launcher.training.data.sampling.permutation import advance, permutation
from notebook_launcher.training.data.sampling.samplers import SeedableRandomSampler, new_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["IndexStream", "indices_of"]

PIECE = 2**16


class IndexStream:
    """The indices of one iteration of a sampler."""

    def __init__(self, pieces: Iterator[torch.Tensor], length: int) -> None:
        self.length = length
        """Number of indices in the whole iteration."""
        self._pieces = pieces
        self._next: list[torch.Tensor] = []

    def take(self, count: int) -> torch.Tensor:
        """Return the next `count` indices; fewer at the end."""
        parts: list[torch.Tensor] = []
        while count > 0:
            piece = self._next.pop() if self._next else next(self._pieces, None)
            if piece is None:
                break
            if len(piece) > count:
                self._next.append(piece[count:])
                piece = piece[:count]
            parts.append(piece)
            count -= len(piece)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def give_back(self, indices: torch.Tensor) -> None:
        """Let `take` return these again, first."""
        if len(indices):
            self._next.append(indices)

    def skip(self, count: int) -> None:
        """Leave the next `count` indices out."""
        while count > 0 and (taken := len(self.take(min(count, PIECE)))):
            count -= taken


def indices_of(sampler: Any) -> IndexStream | None:
    """Return the indices of an iteration of a sampler that begins; None for a sampler that is not torch's own.

    A sampler that draws with replacement is not among them: it has no list. Nothing is drawn before the first `take`.
    """
    draw = DRAWN_BY.get(type(sampler))
    if draw is None or torch.get_default_device().type != "cpu":
        return None
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        return None
    return IndexStream(draw(sampler), len(sampler))


def _ranged(sampler: range) -> Iterator[torch.Tensor]:
    for begin in range(0, len(sampler), PIECE):
        part = sampler[begin : begin + PIECE]
        yield torch.arange(part.start, part.stop, part.step)


def _sequential(sampler: SequentialSampler) -> Iterator[torch.Tensor]:
    return _ranged(range(len(sampler)))


def _random(sampler: RandomSampler) -> Iterator[torch.Tensor]:
    generator = sampler.generator
    if generator is not None:
        yield from _permutations(sampler, generator, shared=True)
        return
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    yield from _permutations(sampler, torch.Generator().manual_seed(seed), shared=False)


def _seedable(sampler: SeedableRandomSampler) -> Iterator[torch.Tensor]:
    yield from _permutations(sampler, new_generator(sampler.initial_seed + sampler.epoch), shared=False)
    sampler.epoch += 1


def _permutations(sampler: RandomSampler, generator: torch.Generator, *, shared: bool) -> Iterator[torch.Tensor]:
    length = len(sampler.data_source)
    wholes, rest = divmod(sampler.num_samples, length)
    for _ in range(wholes):
        yield from permutation(length, generator, shared=shared)
    if rest:
        yield from _cut(permutation(length, generator, shared=shared), rest)
    elif shared:
        advance(generator, length)  # The sampler draws a permutation and takes nothing of it.


def _distributed(sampler: DistributedSampler[Any]) -> Iterator[torch.Tensor]:
    length = len(sampler.dataset)  # type: ignore[arg-type]
    at = 0
    # What evens the ranks out is the epoch's start again, and as often as needed.
    while at < sampler.total_size:
        if sampler.shuffle:
            pieces = permutation(length, torch.Generator().manual_seed(sampler.seed + sampler.epoch), shared=False)
        else:
            pieces = _ranged(range(length))
        for piece in _cut(pieces, sampler.total_size - at):
            yield piece[(sampler.rank - at) % sampler.num_replicas :: sampler.num_replicas]
            at += len(piece)


def _weighted(sampler: WeightedRandomSampler) -> Iterator[torch.Tensor]:
    yield torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator)


def _cut(pieces: Iterator[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """Yield the first `count` indices."""
    for piece in pieces:
        yield piece[:count]
        count -= len(piece)
        if count <= 0:
            return


DRAWN_BY: dict[type, Callable[[Any], Iterator[torch.Tensor]]] = {
    range: _ranged,
    SequentialSampler: _sequential,
    RandomSampler: _random,
    SeedableRandomSampler: _seedable,
    DistributedSampler: _distributed,
    WeightedRandomSampler: _weighted,
}
