"""Calls functions on modules as soon as these have been imported, without importing them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["after_import"]


def after_import(callbacks: Mapping[str, Callable[[types.ModuleType], None]]) -> None:
    """Call each callback with its module: now if the module is imported already, otherwise right after its import."""
    waiting = dict(callbacks)
    for name in callbacks:
        if (module := sys.modules.get(name)) is not None:
            waiting.pop(name)(module)
    sys.meta_path.insert(0, _Finder(waiting))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, waiting: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._waiting = waiting

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        callback = self._waiting.pop(fullname, None)
        if callback is None:
            return None
        spec = importlib.util.find_spec(fullname)  # Calls this method again, which then finds no callback.
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, callback)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, callback: Callable[[types.ModuleType], None]) -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # From now on the module looks as usual, because `inspect` and `pickle` read its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)
