"""The arguments of the function that a panel launches."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Arguments"]


class Arguments(MutableMapping[str, Any]):
    """The arguments of the function: a value for each name that was set. Others keep their defaults."""

    def __init__(self, check: Callable[[str], None], changed: Callable[[str | None], None]) -> None:
        self._values: dict[str, Any] = {}
        self._check = check
        self._changed = changed

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        self._values[name] = value
        self._changed(name)

    def __delitem__(self, name: str) -> None:
        del self._values[name]
        self._changed(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def replace(self, values: Mapping[str, Any]) -> None:
        """Set all at once; raises `ConfigError` for a name that the function does not take."""
        for name in values:
            self._check(name)
        self._values = dict(values)
        self._changed(None)
