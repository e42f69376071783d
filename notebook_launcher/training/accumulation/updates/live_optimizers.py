"""The prepared optimizers that are in use."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.training.accumulation.updates.optimizer import AcceleratedOptimizer

__all__ = ["LiveOptimizers"]


class LiveOptimizers:
    """The prepared optimizers that are in use, in order.

    The optimizers are held weakly: each one refers to its `Updates`, and a strong reference back would be a cycle that
    only the garbage collector frees.
    """

    def __init__(self, optimizers: Iterable[AcceleratedOptimizer] = ()) -> None:
        self._refs = [weakref.ref(prepared) for prepared in optimizers]

    def __iter__(self) -> Iterator[AcceleratedOptimizer]:
        return (prepared for prepared in (ref() for ref in self._refs) if prepared is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, prepared: AcceleratedOptimizer) -> None:
        """Add an optimizer."""
        self._refs.append(weakref.ref(prepared))

    def clear(self) -> None:
        """Forget all optimizers."""
        self._refs.clear()

    def __reduce__(self) -> tuple[type[LiveOptimizers], tuple[list[AcceleratedOptimizer]]]:
        return LiveOptimizers, (list(self),)
