"""Samplers: a random order that seed and epoch determine, and the chain of samplers in a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sized


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
        yield from RandomSampler(self.data_source, self.replacement, self._num_samples, generator)
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
# The indices that torch's own samplers draw, as tensors: a sampler's list of 10^8 Python integers takes 4 GB.
#
# The numbers, their order, and what is drawn from which generator equal the samplers' `__iter__`.


PIECE = 2**16


class IndexStream:
    """The indices of one iteration of a sampler."""

    def __init__(self, pieces: Iterator[torch.Tensor], length: int) -> None:
        self.left = length
        """Number of indices that are left of the iteration."""
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
            self.left -= len(piece)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def give_back(self, indices: torch.Tensor) -> None:
        """Let `take` return these again, first."""
        if len(indices):
            self._next.append(indices)
            self.left += len(indices)

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


def _distributed(sampler: Any) -> Iterator[torch.Tensor]:
    length = len(sampler.dataset)
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


# --------------------------------------------------------------------------------------------------------------------
# A random permutation in pieces: the numbers of `torch.randperm`, without waiting for all of them.
#
# `torch.randperm` exchanges place i with a random place from i on, for i = 0, 1, 2, ... So what is at place i is
# known after i exchanges: the first indices of 10^8 need not wait for the last, which takes from 5 to 20 seconds.


GRADUAL_FROM = 2**23
"""Length from which a permutation comes in pieces. `torch.randperm` takes 0.1 to 0.5 s for as many numbers."""
RANDPERM_CHANGES = (2**32 - 1) // 20
"""Length from which `torch.randperm` draws 64 bits for each exchange, instead of 32."""
PERMUTED = 2048
"""Exchanges in a piece, an even number. Few, so that most pieces of a long permutation touch no place twice."""
ONE_BY_ONE = 32
"""Exchanges that are made one by one if they touch a place twice. More are halved."""


def permutation(length: int, generator: torch.Generator | None, *, shared: bool = True) -> Iterator[torch.Tensor]:
    """Yield `torch.randperm(length, generator=generator)` in pieces.

    A long permutation takes 4 bytes for each number, and comes in pieces of 2048 numbers. A short one comes at once.

    Args:
        length: Number of numbers that are permuted.
        generator: Draws them; None: torch's default generator.
        shared: True if others draw from the generator. It is then left in the state after the whole permutation before
            the first piece comes. That takes 3 ns for each number.
    """
    where = torch.device("cpu") if generator is None else generator.device
    if where.type != "cpu" or not GRADUAL_FROM <= length < RANDPERM_CHANGES:
        # Numbers of 32 bits are permuted alike, in half the memory.
        dtype = torch.int32 if length < 2**31 else torch.int64
        yield torch.randperm(length, generator=generator, dtype=dtype, device=where)
        return
    if generator is None:
        generator = torch.default_generator
    if shared:
        generator, original = torch.Generator().set_state(generator.get_state()), generator
        advance(original, length)
    yield from _gradually(length, generator)


def advance(generator: torch.Generator | None, length: int) -> None:
    """Leave the generator in the state after `torch.randperm(length)`."""
    if (
        length < GRADUAL_FROM
        or length >= RANDPERM_CHANGES
        or (generator is not None and generator.device.type != "cpu")
    ):
        torch.randperm(length, generator=generator, device=None if generator is None else generator.device)
        return
    left = length - 1
    while left:
        left -= len(_draw(min(left, 2**20), generator))


def _draw(count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw numbers of 32 bits, as many as `count`: a pair in each number of 64 bits."""
    if count == 1:
        # One draw without its highest bit; the last exchange looks at the lowest alone.
        return torch.empty(1, dtype=torch.int32).random_(generator=generator).long()
    pairs = torch.empty(count // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return torch.stack((pairs >> 32 & 0xFFFFFFFF, pairs & 0xFFFFFFFF), 1).view(-1)


def _gradually(length: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    order = torch.arange(length, dtype=torch.int32)
    at = 0
    while length - at > 1:
        numbers = _draw(min(PERMUTED, length - 1 - at), generator)
        count = len(numbers)
        places = torch.arange(at, at + count)
        _exchange(order, at, places + numbers % (length - places))
        yield order[at : at + count]
        at += count
    yield order[at:]


def _exchange(order: torch.Tensor, at: int, targets: torch.Tensor) -> None:
    """Exchange the places from `at` on with their targets, one after the other."""
    here, theirs = order[at : at + len(targets)].clone(), order[targets]
    order[targets] = here
    # If a target occurs twice, or is one of the places, it does not hold the number just written there.
    if int(targets.min()) >= at + len(targets) and torch.equal(order[targets], here):
        order[at : at + len(targets)] = theirs
        return
    order[targets] = theirs
    half = len(targets) // 2
    if half >= ONE_BY_ONE:
        _exchange(order, at, targets[:half])
        _exchange(order, at + half, targets[half:])
        return
    numbers = targets.tolist()
    found = dict(zip(numbers, theirs.tolist(), strict=True))
    found.update(enumerate(here.tolist(), at))
    for place, target in enumerate(numbers, at):
        found[place], found[target] = found[target], found[place]
    order[torch.tensor(list(found))] = torch.tensor(list(found.values()), dtype=order.dtype)
