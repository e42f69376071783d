"""Rounds, which are the batches that all ranks get at once, and the loaders that are being iterated."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ActiveLoaders", "Round", "relative_weights"]


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One round: every rank's batch, counted in samples, in rank order."""

    rows: tuple[int, ...]
    """Samples in each rank's batch, also samples that were added to even it out."""
    real: tuple[int, ...]
    """Samples of each batch that no rank has had before; they come first, and `gather_for_metrics` keeps them."""
    weights: tuple[int, ...]
    """The batch's weight in a window's mean: `rows`, or 0 for a batch that only keeps step."""

    def spread(self, copies: int) -> Round:
        """Return the round in which `copies` neighbouring ranks have the same batch, real on the first of them."""
        rows = tuple(count for count in self.rows for _ in range(copies))
        real = tuple(count if copy == 0 else 0 for count in self.real for copy in range(copies))
        return Round(rows, real, tuple(weight for weight in self.weights for _ in range(copies)))


def relative_weights(loader: Any) -> tuple[float, ...] | None:
    """Return the weights of a loader's present batches, in full batches; None if they are unknown."""
    drawn = loader.current_round
    if drawn is None:
        return None
    full = loader.current_full_rows or max(drawn.rows) or 1
    return tuple(weight / full for weight in drawn.weights)


def _no_state() -> None:
    return None


IN_STEP = 2
"""Micro-batches in a row that each drew a batch from a loader, before the loader counts as read side by side."""


class ActiveLoaders:
    """The prepared loaders that are being iterated; the active one is the one that has drawn a batch last."""

    def __init__(
        self,
        on_begin: Callable[[], None] | None = None,
        *,
        on_next: Callable[[], None] | None = None,
        follows_draws: bool = True,
    ) -> None:
        """Begin without loaders.

        Args:
            on_begin: Called when an iteration begins; a bound method, for as long as its object is in use.
            on_next: Called when an outermost loop asks for its next batch.
            follows_draws: False: the active loader is the one whose iteration began last, as in Accelerate.
        """
        self._loaders: list[weakref.ref[Any]] = []
        """The loaders, the active one last."""
        self._follows_draws = follows_draws
        self._draws: dict[object, tuple[int, int]] = {}
        """By the iterations of the loaders: the batches drawn up to the last micro-batch, and the number of
        micro-batches in a row that drew one batch each while several loaders were iterated."""
        # Weakly: the method's object holds these loaders, and only the garbage collector would free such a cycle.
        self._on_begin = None if on_begin is None else weakref.WeakMethod(on_begin)
        self.on_next = on_next
        self.gradient_state: Callable[[], Any] = _no_state
        """Returns the `GradientState` whose loaders these are; None outside an Accelerator."""

    def replace_on_next(self, on_next: Callable[[], None]) -> None:
        """Call another function from now on when an outermost loop asks for its next batch."""
        self.on_next = on_next

    def begin(self, loader: Any) -> None:
        """Make `loader` the active one."""
        self._loaders.append(weakref.ref(loader))
        if self._on_begin is not None and (on_begin := self._on_begin()) is not None:
            on_begin()

    def note_end(self, loader: Any) -> None:
        """Note that a loop over `loader` has come to its end."""
        if (state := self.gradient_state()) is not None:
            state.note_end(loader)

    def end(self, loader: Any) -> None:
        """Remove `loader`, wherever it stands."""
        kept = [ref for ref in self._loaders if ref() is not None]
        for at in reversed(range(len(kept))):
            if kept[at]() is loader:
                del kept[at]
                break
        self._loaders = kept

    def note_draw(self, loader: Any) -> None:
        """Make a loader that has drawn a batch the active one."""
        if self._follows_draws and len(self._loaders) > 1 and self._loaders[-1]() is not loader:
            self._loaders.sort(key=lambda ref: ref() is loader)

    def note_micro_batch(self, active: Any) -> int:
        """Note what the loaders have drawn since the last micro-batch; return the number of the active's batches."""
        newly = active.num_drawn - self._draws.get(active.iteration_token, (0, 0))[0]
        has_others = len(self._loaders) > 1
        draws: dict[object, tuple[int, int]] = {}
        for loader in self.loaders:
            before, in_a_row = self._draws.get(loader.iteration_token, (0, 0))
            is_next = has_others and loader.num_drawn == before + 1
            draws[loader.iteration_token] = loader.num_drawn, in_a_row + 1 if is_next else 0
        self._draws = draws
        return int(newly)

    def in_step(self, loader: Any) -> list[Any]:
        """Return the other loaders that are iterated beside this one, as `zip` does: each micro-batch draws from them.

        The loop around another loop draws one batch for several micro-batches of the inner one.
        """
        if len(self._loaders) < 2:
            return []
        others = [other for other in self.loaders if other is not loader]
        return [other for other in others if self._draws.get(other.iteration_token, (0, 0))[1] >= IN_STEP]

    @property
    def active(self) -> Any | None:
        """The loader that has drawn a batch last and is still iterated."""
        while self._loaders:
            loader = self._loaders[-1]()
            if loader is not None:
                return loader
            self._loaders.pop()
        return None

    @property
    def loaders(self) -> list[Any]:
        """All loaders that are being iterated, the oldest first."""
        return [loader for loader in (ref() for ref in self._loaders) if loader is not None]

    def __reduce__(self) -> tuple[type[ActiveLoaders], tuple[()]]:
        return ActiveLoaders, ()  # loaders at work stay where they are
