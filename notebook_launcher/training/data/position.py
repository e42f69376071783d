"""Position of a loop in its data, and the states that made their order: enough to continue on other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from notebook_launcher.training.data.samplers import new_generator
from notebook_launcher.training.random import capture_rng_states, restore_rng_states

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DEFAULT_GENERATORS = ("random_state", "numpy_random_seed", "torch_manual_seed")
"""The states of `capture_rng_states` that samplers without a generator of their own draw from."""


class Position(NamedTuple):
    """A point of an epoch, in samples of the whole data set; false at its start."""

    epoch: int = 0
    samples: int = 0
    """Samples that all ranks together have had."""
    streams: tuple[int, ...] = ()
    """With workers that read an iterable data set: the elements of each worker's stream that all ranks have had."""
    stream: int = 0
    """The worker that the last batch came from."""

    def __bool__(self) -> bool:
        return self.samples > 0


@dataclasses.dataclass(slots=True)
class LoaderProgress:
    """The progress of a loader; a loader of the rest of an epoch shares the progress of the whole."""

    iteration: int
    """The number of the next loop's epoch, counted from 0."""
    position: Position
    """The point at which the loop stands, or was left."""
    order: Order | None = None
    """The states that drew the order of the epoch that `position` is in."""
    begin_at: Position | None = None
    """The point at which the next loop begins; None: the start of its epoch."""
    from_start: bool = False
    """True if the next loop begins at the start of the epoch of `begin_at`."""
    is_complete: bool = False
    """True if no batch comes after `position` in its epoch."""
    was_evaluation: bool = False
    """True if the loop that `position` is of evaluated, and was left before its end."""
    later: Order | None = None
    """States, loaded from a checkpoint, that draw the order of the epoch after the one that `position` is in."""
    has_seeded_workers: bool = False
    """True if the run that saved had started persistent workers: their seed is drawn at their start alone."""

    loop: object | None = None
    """The token of the newest loop, the only one that writes `was_evaluation`."""

    def begin(self, loop: object, start: Position) -> None:
        """Note that a loop begins at `start`."""
        self.loop, self.begin_at, self.later = loop, None, None
        self.position, self.is_complete, self.was_evaluation = start, False, False

    def leave(self, loop: object, *, evaluates: bool) -> None:
        """Note that a loop was left before its end, unless another one has begun."""
        if self.loop is loop:
            self.was_evaluation = evaluates

    def set_epoch(self, epoch: int) -> None:
        """Forget positions in another epoch."""
        self.iteration = epoch
        if self.begin_at is not None and self.begin_at.epoch != epoch:
            self.begin_at = None
        if self.position.epoch != epoch:
            self.position = Position(epoch)

    def count_epoch(self, epoch: int) -> None:
        """Count an epoch that has ended."""
        if self.iteration == epoch:
            self.iteration = epoch + 1
            self.position, self.is_complete = Position(self.iteration), False


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The states of the generators that draw the order, from before it was drawn."""

    generators: tuple[Any, ...]
    """States of samplers' and data sets' generators; None for an object that draws from torch's generator."""
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """States of the default generators of Python, NumPy and torch."""

    @classmethod
    def capture(cls, owners: Sequence[Any]) -> Order:
        """Return the states at this moment."""
        generators = (None if owner.generator is None else owner.generator.get_state() for owner in owners)
        return cls(tuple(generators), _default_states())

    def restore_generators(self, owners: Sequence[Any]) -> None:
        """Set the generators of samplers and data sets; make the missing ones."""
        for owner, state in zip(owners, self.generators, strict=False):
            if state is None:
                continue
            if owner.generator is None:
                owner.generator = new_generator(0)
            owner.generator.set_state(state)

    @contextlib.contextmanager
    def replayed(self, owners: Sequence[Any]) -> Iterator[None]:
        """Draw the same order again inside the block.

        Afterwards the default generators are as they were before. The generators of samplers and data sets are not,
        because they continue from there.
        """
        here = _default_states()
        set_apart = [
            (owner, owner.generator)
            for owner, state in zip(owners, self.generators, strict=False)
            if state is None and owner.generator is not None
        ]
        restore_rng_states(self.defaults)
        self.restore_generators(owners)
        try:
            for owner, _ in set_apart:
                owner.generator = None
            yield
        finally:
            for owner, generator in set_apart:
                owner.generator = generator
            restore_rng_states(here)


def _default_states() -> dict[str, Any]:
    states = capture_rng_states()
    return {name: states[name] for name in DEFAULT_GENERATORS if name in states}


def generator_owners(candidates: Iterable[Any]) -> list[Any]:
    """Return the candidates with a `generator` attribute that is torch's, or None."""
    missing = object()
    return [
        candidate
        for candidate in candidates
        if isinstance(getattr(candidate, "generator", missing), (torch.Generator, type(None)))
    ]
