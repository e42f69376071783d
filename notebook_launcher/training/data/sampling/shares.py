"""One rank's batches as indices, each with its round."""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import BatchSampler

from notebook_launcher.training.data.rounds import Round
from notebook_launcher.training.data.sampling.indices import IndexStream, indices_of
from notebook_launcher.training.data.sampling.samplers import count_samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "Share",
    "Stretch",
    "batches_of",
    "full_rounds",
    "shares_in",
    "shares_of",
    "split_at",
    "stream_of",
    "stretches_of",
]

ROUNDS = 64
"""Most rounds in a stretch: many, so that a batch costs little, and few enough to leave the garbage collector alone."""


class Share(NamedTuple):
    """One rank's batch of a round."""

    indices: Any
    """The rank's indices; None: it has none, and its iteration is over."""
    round: Round
    samples: int
    """Samples of the epoch that all ranks together have had, with this round."""


class Stretch(NamedTuple):
    """One rank's batches of neighbouring rounds that count the same."""

    batches: list[Any]
    """The rank's indices in each round; `[None]`: it has none, and its iteration is over."""
    round: Round
    """A round that stands for each of them."""
    samples: int
    """Samples of the epoch that all ranks together have had before."""


def stretches_of(batch_sampler: Any, skip: int = 0) -> Iterator[Stretch]:
    """Return the stretches of a batch sampler that is shared out; of any other, all its batches.

    Args:
        batch_sampler: A batch sampler; or a sampler, whose items then count one sample each.
        skip: Number of samples of the epoch that were consumed. Of a batch that they end in, the rest is yielded.
    """
    if hasattr(batch_sampler, "stretches"):
        stretches: Iterator[Stretch] = batch_sampler.stretches(skip)
        return stretches
    return _unshared(batch_sampler, skip)


def shares_of(batch_sampler: Any, skip: int = 0) -> Iterator[Share]:
    """Return the shares in the stretches of a batch sampler."""
    return shares_in(stretches_of(batch_sampler, skip))


def shares_in(stretches: Iterable[Stretch]) -> Iterator[Share]:
    """Yield the shares in stretches."""
    for batches, drawn, samples in stretches:
        per_round = sum(drawn.real)
        for number, indices in enumerate(batches, 1):
            yield Share(indices, drawn, samples + number * per_round)


def stream_of(batch_sampler: Any) -> IndexStream | None:
    """Return the indices of torch's own batch sampler over a sampler of torch's own; None for others."""
    return indices_of(batch_sampler.sampler) if type(batch_sampler) is BatchSampler else None


def batches_of(batch_sampler: Any, stream: IndexStream | None = None) -> Iterator[Any]:
    """Return the batches of a batch sampler, or the rest of its stream; or the items of a sampler."""
    stream = stream_of(batch_sampler) if stream is None else stream
    if stream is not None:
        return _cut(stream, batch_sampler.batch_size, drop_last=batch_sampler.drop_last)
    indices = indices_of(batch_sampler)
    return iter(batch_sampler) if indices is None else _items(indices)


def full_rounds(stream: IndexStream, left: int, num_processes: int, rows: int) -> Iterator[Any]:
    """Yield the indices of the full rounds that are left of a stream, many rounds at once: round by rank by row.

    Args:
        stream: Indices that are shared out.
        left: Number of indices that it still has.
        num_processes: Number of ranks.
        rows: Samples of every rank in a full round.
    """
    rounds = max(left, 0) // (num_processes * rows)
    while rounds:
        count = min(rounds, ROUNDS)
        yield stream.take(count * num_processes * rows).view(count, num_processes, rows)
        rounds -= count


def _cut(stream: IndexStream, size: int, *, drop_last: bool) -> Iterator[list[int]]:
    while len(indices := stream.take(ROUNDS * size)):
        full = len(indices) // size * size
        yield from indices[:full].view(-1, size).tolist()
        if full < len(indices) and not drop_last:
            yield indices[full:].tolist()


def _items(stream: IndexStream) -> Iterator[int]:
    while len(indices := stream.take(ROUNDS)):
        yield from indices.tolist()


def _unshared(batch_sampler: Any, skip: int) -> Iterator[Stretch]:
    known: dict[int, Round] = {}
    stream = stream_of(batch_sampler)
    if stream is not None and not skip:
        size = batch_sampler.batch_size
        full = known[size] = Round((size,), (size,), (size,))
        for block in full_rounds(stream, stream.length, 1, size):
            yield Stretch(block[:, 0].tolist(), full, skip)
            skip += block.numel()
        rest = batches_of(batch_sampler, stream)
    else:
        _, rest = split_at(batches_of(batch_sampler, stream), skip)
    for batch in rest:
        count = count_samples(batch)
        drawn = known.get(count) or known.setdefault(count, Round((count,), (count,), (count,)))
        yield Stretch([batch], drawn, skip)
        skip += count


def split_at(batches: Iterator[Any], skip: int, keep: int = 0) -> tuple[list[Any], Iterator[Any]]:
    """Skip the first `skip` samples; return the last `keep` batches of them, and the batches that are left."""
    skipped: collections.deque[Any] = collections.deque(maxlen=keep)
    for batch in batches:
        count = count_samples(batch)
        if not 0 < count <= skip:
            return list(skipped), itertools.chain((batch[skip:] if skip else batch,), batches)
        skip -= count
        skipped.append(batch)
    return list(skipped), iter(())
