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


def after_import(callbacks: Mapping[str, Callable[[types.ModuleType], None]]) -> None:
    """Call each callback with its module: now if the module is imported already, otherwise right after its import."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _Finder())
    for name, callback in callbacks.items():
        if (module := sys.modules.get(name)) is not None:
            callback(module)
        else:
            finder.waiting.setdefault(name, []).append(callback)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[types.ModuleType], None]]] = {}

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if (callbacks := self.waiting.pop(fullname, None)) is None:
            return None
        spec = importlib.util.find_spec(fullname)  # Calls this method again, which then finds no callbacks.
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, callbacks)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, callbacks: Sequence[Callable[[types.ModuleType], None]]) -> None:
        self._loader = loader
        self._callbacks = callbacks

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
        for callback in self._callbacks:
            callback(module)
