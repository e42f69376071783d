"""The prepared loaders that are being iterated, and the weights of their present batches."""

from __future__ import annotations

import collections
import functools
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_launcher.training.accumulation.gradient_state import GradientState
    from notebook_launcher.training.data.rows import Round
    from notebook_launcher.training.requests import Safepoint

__all__ = ["ActiveLoader", "ActiveLoaders", "full_rows_of", "relative_weights"]

NO_DRAWS = (0, 0)
"""A loader's batches so far, and how many micro-batches in a row drew one, before its first micro-batch."""
IN_STEP = 2
"""Micro-batches in a row that each drew a batch from a loader, before the loader counts as read side by side."""


class ActiveLoader(Protocol):
    """A prepared loader, as accumulation sees it; `DataLoaderStateMixin` describes the attributes."""

    end_of_dataloader: bool
    remainder: int
    current_full_rows: int | None
    current_round: Round | None
    current_rows: int | None
    counts_otherwise: str
    iteration_token: object | None
    num_drawn: int

    def note_repeat(self) -> None:
        """Note that the loop leaves out a batch that a rank got again."""


def full_rows_of(loader: ActiveLoader) -> int:
    """Return the samples of a full batch of one rank, at least 1: of the present round if the loader does not know."""
    drawn = loader.current_round
    return loader.current_full_rows or (0 if drawn is None else max(drawn.rows)) or 1


def relative_weights(loader: ActiveLoader) -> tuple[float, ...] | None:
    """Return the weights of a loader's present batches, in full batches; None if they are unknown."""
    drawn = loader.current_round
    if drawn is None:
        return None
    full = full_rows_of(loader)
    return tuple(weight / full for weight in drawn.weights)


class ActiveLoaders:
    """The prepared loaders that are being iterated; the active one is the one that has drawn a batch last.

    Args:
        owner: Told when a loop begins and ends, for as long as it is in use.
        requests: Carried out when an outermost loop asks for its next batch; None: nobody makes any.
        follows_draws: False: as in Accelerate, the active loader is the one whose iteration began last, and it
            alone says whether its data end.
    """

    def __init__(
        self,
        owner: GradientState | None = None,
        *,
        requests: Safepoint | None = None,
        follows_draws: bool = True,
    ) -> None:
        self._loaders: list[ActiveLoader] = []
        """The loaders, the active one last. Their iterations hold them as long."""
        self.active: ActiveLoader | None = None
        """The loader that has drawn a batch last and is still iterated."""
        self.are_several = False
        """True if several loaders are being iterated."""
        self._follows_draws = follows_draws
        self._draws: dict[object, tuple[int, int]] = {}
        """By the iterations of the loaders: the batches drawn up to the last micro-batch, and the number of
        micro-batches in a row that drew one batch each while several loaders were iterated."""
        self.keeps_rounds = False
        """True if micro-batches get the rounds of their batches in the order in which these were drawn, so that a
        loop may read ahead."""
        self.micro_batch_round: Round | None = None
        """With `keeps_rounds`, the round of the present micro-batch; None if it is unknown."""
        self._rounds: dict[object, collections.deque[Round | None]] = {}
        """By the `id` of a loader: the rounds of its batches that were drawn and have had no micro-batch."""
        # Weakly: the owner holds these loaders, and only the garbage collector would free such a cycle.
        self._owner: weakref.ref[GradientState] | None = None if owner is None else weakref.ref(owner)
        self.requests = requests

    @property
    def owner(self) -> GradientState | None:
        """The state of accumulation whose loaders these are; None outside an Accelerator."""
        return None if self._owner is None else self._owner()

    def belong_to(self, owner: GradientState) -> None:
        """Tell another owner from now on when a loop begins and ends."""
        self._owner = weakref.ref(owner)

    def begin(self, loader: ActiveLoader) -> None:
        """Make `loader` the active one."""
        self._rounds.pop(id(loader), None)
        self._loaders.append(loader)
        self.active, self.are_several = loader, len(self._loaders) > 1
        if (owner := self.owner) is not None:
            owner.loop_begins()

    def note_end(self, loader: ActiveLoader) -> None:
        """Note that a loop over `loader` has come to its end."""
        if (owner := self.owner) is not None:
            owner.loops.note_end(loader)

    def evaluates(self) -> bool:
        """Return True if the present loop evaluates, as far as the owner knows."""
        owner = self.owner
        return owner is not None and owner.loops.evaluates()

    def end(self, loader: ActiveLoader) -> None:
        """Remove `loader`, wherever it stands."""
        for at in reversed(range(len(self._loaders))):
            if self._loaders[at] is loader:
                del self._loaders[at]
                break
        self.active, self.are_several = self._loaders[-1] if self._loaders else None, len(self._loaders) > 1

    def note_draw(self, loader: ActiveLoader) -> None:
        """Make a loader that has drawn a batch the active one."""
        if self.keeps_rounds and not self.evaluates():
            self._rounds.setdefault(id(loader), collections.deque()).append(loader.current_round)
        if self.active is not loader and self._follows_draws and loader in self._loaders:
            self._loaders.sort(key=lambda other: other is loader)
            self.active = loader

    def take_round(self) -> None:
        """With `keeps_rounds`, find the round of a new micro-batch.

        It belongs to the first batch drawn that has had none, even when a loop that reads ahead has made its last draw;
        or, in a loop that cuts a batch, to the same batch as the micro-batch before.
        """
        active = self.active
        if active is not None:
            waiting = self._rounds.get(id(active))
        else:
            waiting = next((rounds for rounds in self._rounds.values() if rounds), None)
        if waiting:
            self.micro_batch_round = waiting.popleft()
        elif active is None:
            self.micro_batch_round = None

    def awaits_micro_batch(self, loader: ActiveLoader) -> bool:
        """Return True if a batch of this loop is known to have had no micro-batch yet."""
        return bool(self._rounds.get(id(loader)))

    def note_micro_batch(self, active: ActiveLoader) -> int:
        """Note what the loaders have drawn since the last micro-batch; return the number of the active's batches."""
        num_drawn, token = active.num_drawn, active.iteration_token
        newly = num_drawn - self._draws.get(token, NO_DRAWS)[0]
        if len(self._loaders) == 1:  # As nearly always: what follows costs 2 µs.
            self._draws = {token: (num_drawn, 0)}
            return int(newly)
        draws: dict[object, tuple[int, int]] = {}
        for loader in self.loaders:
            before, in_a_row = self._draws.get(loader.iteration_token, NO_DRAWS)
            is_next = loader.num_drawn == before + 1
            draws[loader.iteration_token] = loader.num_drawn, in_a_row + 1 if is_next else 0
        self._draws = draws
        return int(newly)

    def in_step(self, loader: ActiveLoader) -> list[ActiveLoader]:
        """Return the other loaders that are iterated beside this one, as `zip` does: each micro-batch draws from them.

        The loop around another loop draws one batch for several micro-batches of the inner one.
        """
        others = [other for other in self.loaders if other is not loader]
        return [other for other in others if self._draws.get(other.iteration_token, NO_DRAWS)[1] >= IN_STEP]

    def is_at_end(self, loader: ActiveLoader | None) -> bool:
        """Return True if a loader is at its last batch, or another one that is iterated beside it, as by `zip`."""
        if loader is None or loader.end_of_dataloader:
            return loader is not None
        if len(self._loaders) < 2 or not self._follows_draws:
            return False
        return any(other.end_of_dataloader for other in self.in_step(loader))

    @property
    def loaders(self) -> list[ActiveLoader]:
        """All loaders that are being iterated, the oldest first."""
        return list(self._loaders)

    def __reduce__(self) -> tuple[Callable[[], ActiveLoaders], tuple[()]]:
        # Loaders at work stay where they are, and so does the safepoint; the owner's copy claims its loaders again.
        return functools.partial(ActiveLoaders, follows_draws=self._follows_draws), ()
