"""Exceptions that arrive as their own type, whatever their constructor asks for.

Python rebuilds an exception by calling its class with `args`, which fails for

    class HTTPError(Exception):
        def __init__(self, code, text):
            super().__init__(text)

Here the object is made by the nearest built-in base, `__init__` of the user's class is not called, and
the attributes are set, those in `__slots__` and of frozen data classes too. Classes with a `__reduce__`
of their own in Python keep it.
"""

from __future__ import annotations

import copyreg
import types
from typing import Any

__all__ = ["rebuild_exception", "reduce_exception", "restore_attributes"]

# Set for types that a class statement, or an extension at run time, made.
HEAP_TYPE = 1 << 9


def reduce_exception(exc: BaseException) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return the reduction of an exception; None if its class defines its own.

    The traceback, the cause and the context do not travel, as with pickle.
    """
    cls = type(exc)
    if isinstance(cls.__reduce__, types.FunctionType) or cls.__reduce_ex__ is not object.__reduce_ex__:
        return None
    reduced = cls.__reduce__(exc)
    if not isinstance(reduced, tuple) or reduced[0] is not cls:
        return None
    state = reduced[2] if len(reduced) > 2 else None
    slots = {name: getattr(exc, name) for name in _slot_names(cls) if hasattr(exc, name)}
    return rebuild_exception, (cls, reduced[1]), {**slots, **(state or {})}


def _slot_names(cls: type) -> list[str]:
    names: list[str] = copyreg._slotnames(cls)  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle does
    return names


def rebuild_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Create an exception without calling an `__init__` that its class may define."""
    base: Any = next(c for c in cls.__mro__ if not c.__flags__ & HEAP_TYPE)
    exc: BaseException = base.__new__(cls, *args)
    base.__init__(exc, *args)
    return exc


def restore_attributes(exc: BaseException, attributes: dict[str, Any]) -> None:
    """Set the attributes that `reduce_exception` returned, bypassing a `__setattr__` that refuses."""
    for name, value in attributes.items():
        BaseException.__setattr__(exc, name, value)
