"""Samplers: a random order that seed and epoch determine, and the chain of samplers in a loader."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` whose order depends on its seed and epoch, and on nothing else.

    Each iteration that runs to its end counts the epoch on; `set_epoch` sets it.

    The arguments are torch's and `data_seed`; None: the seed that torch's generator was last given.

    `generator` is kept and not drawn from.
    """

    is_chosen = False
    """True if `set_epoch` was called since a prepared loader last read the epoch."""

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        generator = new_generator(self.initial_seed + self.epoch)
        yield from indices_of(RandomSampler(self.data_source, self.replacement, self._num_samples, generator))
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; a prepared loader around it adopts the epoch."""
        self.epoch = epoch
        self.is_chosen = True

    def take_chosen(self) -> int | None:
        """Return the epoch that `set_epoch` chose since the last call; None if it was not called."""
        chosen, self.is_chosen = self.epoch if self.is_chosen else None, False
        return chosen


def new_generator(seed: int) -> torch.Generator:
    """Return a generator on torch's default device, seeded with `seed` modulo 2**64."""
    generator = torch.Generator(device=torch.get_default_device())
    generator.manual_seed(seed if seed < 2**64 else seed - 2**64)
    return generator


def generator_apart() -> torch.Generator:
    """Return a generator with a seed that depends on the default generator's state, and does not change that."""
    with torch.random.fork_rng(devices=[]):
        return new_generator(int(torch.empty((), dtype=torch.int64).random_()))


def count_samples(batch: Any) -> int:
    """Return the number of samples of a sampler's item: the length of a list of indices, 1 for an index."""
    try:
        return len(batch)
    except TypeError:
        return 1


def length_of(sized: Any) -> int | None:
    """Return the length of a data set or a sampler; None if it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        # A batch sampler has a length only where its sampler has one.
        return None


def sampler_chain(dataloader: Any) -> list[Any]:
    """Return the samplers of a loader, the outermost first: shard, batch sampler, sampler."""
    return links_of(dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler)


def links_of(link: Any) -> list[Any]:
    """Return a batch sampler or sampler with all samplers inside it, the outermost first."""
    links: list[Any] = []
    known: set[int] = set()  # A sampler may refer to itself.
    while link is not None and id(link) not in known:
        known.add(id(link))
        links.append(link)
        inner = getattr(link, "batch_sampler", None)
        link = getattr(link, "sampler", None) if inner is None else inner
    return links


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that draws a loader's single indices; None if its batch sampler draws them itself."""
    batches = next(link for link in sampler_chain(dataloader) if getattr(link, "batch_sampler", None) is None)
    alone = batches if dataloader.batch_sampler is None else None
    return getattr(batches, "sampler", alone)


def set_epochs(objects: Iterable[Any], epoch: int) -> None:
    """Set the epoch of everything that has `set_epoch`."""
    for obj in objects:
        if callable(getattr(obj, "set_epoch", None)):
            obj.set_epoch(epoch)


# --------------------------------------------------------------------------------------------------------------------
# A random order without a list of all its numbers: that of 10^8 samples takes 4 GB, and a tensor 0.8.


PIECE = 2**16


def indices_of(sampler: Any) -> Iterator[Any]:
    """Return an iteration of a sampler; the numbers of torch's own random one are never all in a list."""
    if type(sampler) is not RandomSampler or sampler.replacement:
        return iter(sampler)
    return _permutations(sampler)


def _permutations(sampler: RandomSampler) -> Iterator[int]:
    """Yield what `RandomSampler.__iter__` yields without replacement; the generators are drawn from alike."""
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    length, left = len(sampler.data_source), sampler.num_samples
    # The same numbers in 32 bits take half of the memory and half of the time: 400 MB and 3 s for 10^8.
    dtype = torch.int32 if length < 1 << 31 else torch.int64
    for _ in range(left // length + 1):  # Once more than there are whole permutations, as torch's sampler draws.
        order = torch.randperm(length, generator=generator, dtype=dtype)[:left]
        yield from itertools.chain.from_iterable(piece.tolist() for piece in order.split(PIECE))
        left -= length
