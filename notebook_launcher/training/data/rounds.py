"""Rounds, which are the batches that all ranks get at once, and the loaders that are being iterated."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoaderStack", "Round"]


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One round: every rank's batch, counted in samples, in rank order."""

    rows: tuple[int, ...]
    """Samples in each rank's batch, with those that were added to even it out."""
    real: tuple[int, ...]
    """Samples of each batch that no rank has had before; they come first, and `gather_for_metrics` keeps them."""
    weights: tuple[int, ...]
    """The batch's weight in a window's mean: `rows`, or 0 for a batch that only keeps step."""

    def spread(self, copies: int) -> Round:
        """Return the round for ranks of which `copies` neighbours have the same batch; only the first one's is real."""
        rows = tuple(count for count in self.rows for _ in range(copies))
        real = tuple(count if copy == 0 else 0 for count in self.real for copy in range(copies))
        return Round(rows, real, tuple(weight for weight in self.weights for _ in range(copies)))


def _no_state() -> None:
    return None


class LoaderStack:
    """The prepared loaders that are being iterated; the newest is the active one."""

    def __init__(self, on_begin: Callable[[], None] | None = None) -> None:
        """Call `on_begin`, a bound method, whenever an iteration begins, for as long as its object is in use."""
        self._loaders: list[weakref.ref[Any]] = []
        # Weakly: its object holds this stack, and a cycle would keep models until the garbage collector comes.
        self._on_begin = None if on_begin is None else weakref.WeakMethod(on_begin)
        self.on_next: Callable[[], None] | None = None
        """Called when an outermost loop asks for its next batch."""
        self.gradient_state: Callable[[], Any] = _no_state
        """Returns the `GradientState` whose loaders these are; None outside an Accelerator."""

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
        """Remove `loader` from the stack, wherever it stands."""
        kept = [ref for ref in self._loaders if ref() is not None]
        for at in reversed(range(len(kept))):
            if kept[at]() is loader:
                del kept[at]
                break
        self._loaders = kept

    @property
    def active(self) -> Any | None:
        """The loader whose iteration began last and has not ended."""
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

    def __reduce__(self) -> tuple[type[LoaderStack], tuple[()]]:
        return LoaderStack, ()  # loaders at work stay where they are
