"""The short lists in a monitor's messages: what has been sent of each, and what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from notebook_launcher.drawing.legend import LIMITS

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = dict[str, Any]
T = TypeVar("T")


class GrowingFeed(Generic[T]):
    """A list that the run keeps and that only grows, such as its errors."""

    def __init__(self) -> None:
        self._num_sent = 0

    def everything(self, items: Sequence[T]) -> list[T]:
        """Return all items."""
        self._num_sent = 0
        return self.news(items)

    def news(self, items: Sequence[T]) -> list[T]:
        """Return the items since the last message."""
        new = list(items[self._num_sent :])
        self._num_sent = len(items)
        return new


class NoticeFeed:
    """Lines for the user, of which the newest are kept for a page that is reloaded."""

    def __init__(self) -> None:
        self._notices: list[str] = []
        self._num_new = 0
        """Lines since the last message, dropped ones included."""

    def add(self, text: str) -> None:
        """Add a line."""
        self._notices = [*self._notices, text][-LIMITS.notices :]
        self._num_new += 1

    def everything(self) -> list[str]:
        """Return the lines that are kept."""
        self._num_new = 0
        return list(self._notices)

    def news(self) -> list[str]:
        """Return the lines since the last message."""
        new = self._notices[-self._num_new :] if self._num_new else []
        self._num_new = 0
        return new


class SettingFeed:
    """Settings that can be changed while the run goes on, as items SETTING: all of them if one has another value."""

    def __init__(self) -> None:
        self._sent: list[Item] = []

    def everything(self, items: list[Item]) -> list[Item]:
        """Return all settings."""
        self._sent = items
        return items

    def news(self, items: list[Item]) -> list[Item]:
        """Return all settings if the page knows others, else nothing."""
        return [] if items == self._sent else self.everything(items)


class AnswerFeed:
    """Answers to the page's requests; a page that is reloaded waits for none."""

    def __init__(self) -> None:
        self._waiting: list[Item] = []

    def add(self, item: Item) -> None:
        """Add an answer."""
        self._waiting.append(item)

    def everything(self) -> list[Item]:
        """Drop the answers, and return none."""
        self._waiting = []
        return []

    def news(self) -> list[Item]:
        """Return the answers since the last message."""
        new, self._waiting = self._waiting, []
        return new


class FindingFeed:
    """Items FINDING; the last one of each kind is kept for a page that is reloaded."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Item] = {}
        self._new: list[Item] = []

    def add(self, item: Item) -> None:
        """Add an item."""
        self._by_kind[item["kind"]] = item
        self._new.append(item)

    def everything(self) -> list[Item]:
        """Return the last item of each kind."""
        self._new = []
        return list(self._by_kind.values())

    def news(self) -> list[Item]:
        """Return the items since the last message."""
        new, self._new = self._new, []
        return new
