"""A series of values of bounded size, of which readers take what is new to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BoundedSeries"]

T = TypeVar("T")


class BoundedSeries(Generic[T]):
    """Values in the order in which they came; beyond a limit the oldest tenth is dropped.

    One thread appends, any thread reads.

    Args:
        limit: The greatest sum of the sizes of the values that are kept.
        size_of: Returns the size of a value; None: each counts as 1.
    """

    def __init__(self, limit: int, size_of: Callable[[T], int] | None = None) -> None:
        self._limit, self._size_of = limit, size_of
        self._size = 0
        self._kept: tuple[list[T], int] = ([], 0)
        """The kept values, and the number of dropped ones; one tuple, so that readers get both of one moment."""

    @property
    def values(self) -> list[T]:
        """The values that are kept."""
        return self._kept[0]

    def append(self, value: T) -> None:
        """Add a value."""
        self._kept[0].append(value)
        self._size += 1 if self._size_of is None else self._size_of(value)
        if self._size > self._limit:
            self._drop_oldest()

    def since(self, position: int) -> tuple[list[T], int]:
        """Return the values after a position, as far as they are kept, and the next position; the first is 0."""
        values, num_dropped = self._kept
        start = max(0, position - num_dropped)
        new = values[start:]
        return new, num_dropped + start + len(new)

    def _drop_oldest(self) -> None:
        values, num_dropped = self._kept
        num = max(1, len(values) // 10)
        self._size -= num if self._size_of is None else sum(map(self._size_of, values[:num]))
        self._kept = (values[num:], num_dropped + num)
