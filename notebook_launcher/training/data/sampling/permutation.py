"""A random permutation in pieces: the numbers of `torch.randperm`, without waiting for all of them.

`torch.randperm` exchanges place i with a random place from i on, for i = 0, 1, 2, ... So what is at place i is known
after i exchanges: the first indices of 10^8 need not wait for the last, which takes from 5 to 20 seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GRADUAL_FROM", "advance", "permutation"]

GRADUAL_FROM = 2**23
"""Length from which a permutation comes in pieces. `torch.randperm` takes 0.1 to 0.5 s for as many numbers."""
RANDPERM_CHANGES = (2**32 - 1) // 20
"""Length from which `torch.randperm` draws 64 bits for each exchange, instead of 32."""
PIECE = 2048
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
        numbers = _draw(min(PIECE, length - 1 - at), generator)
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
