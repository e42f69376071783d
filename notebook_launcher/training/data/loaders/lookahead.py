"""A look ahead by one item, so that the last item is known as such."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["look_ahead"]

T = TypeVar("T")


def look_ahead(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item with True if it is the last, reading one item ahead.

    An exception comes where it would come without looking ahead: after the item before.
    """
    iterator = iter(items)
    try:
        current = next(iterator)
    except StopIteration:
        return
    while True:
        try:
            following = next(iterator)
        except StopIteration:
            yield current, True
            return
        except Exception:
            yield current, False
            raise
        yield current, False
        current = following
