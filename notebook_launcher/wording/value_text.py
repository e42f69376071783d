"""A value in a few words, for messages, and for people who compare runs; the words never take long to make."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import numbers
import reprlib
import types
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from notebook_launcher.wording.secret_text import redact, without_secrets
from notebook_launcher.wording.text import one_line, shape_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["describe_value", "name_of"]

MAX_TEXT = 80
MAX_ITEMS = 6
MAX_SEARCHED = 10_000
"""Characters of a text in which secrets are looked for."""
PLAIN_MODULES = ("torch", "datetime")
"""Modules with types whose values are one word each (`torch.bfloat16`) and have no `shape`."""


def describe_value(value: Any) -> str:
    """Return `0.1`, `[1, 2, 3]`, `Tensor(3, 4)` or `Linear`.

    The value's own `repr` is not called: it may take long, fail, or copy data from a GPU.
    """
    try:
        return one_line(_Words().repr(value), MAX_TEXT)
    except Exception:  # an attribute of a foreign object may do anything
        return type(value).__name__


def name_of(function: Any) -> str:
    """Return the function's name as the user knows it: `train` for `outer.<locals>.train`."""
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__qualname__", None) or type(function).__name__).rpartition("<locals>.")[2]


class _Words(reprlib.Repr):
    """The standard library's short forms of strings, numbers and lists; for other objects the type and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_TEXT

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(redact(x[:MAX_SEARCHED]), level)

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        # Unlike in the standard library, keys are not sorted: there may be millions of them.
        items = itertools.islice(without_secrets(x.items()), MAX_ITEMS)
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in items]
        return f"{{{', '.join([*shown, *['...'] * (len(x) > len(shown))])}}}" if level > 0 or not x else "{...}"

    def repr_set(self, x: Any, level: int) -> str:  # noqa: ARG002 - as reprlib calls it
        return f"{type(x).__name__} of {len(x):,}"

    repr_frozenset = repr_set

    def repr_instance(self, x: Any, level: int) -> str:
        kind = type(x).__name__
        shape = shape_of(x)
        match x:
            case None | numbers.Number() | range():
                words = super().repr_instance(x, level)
            case enum.Enum():
                words = f"{kind}.{x.name}"
            case PurePath():
                words = repr(str(x))
            case bytes() | bytearray():
                words = f"{kind} of {len(x):,}"
            case dict():
                words = self.repr_dict(x, level)
            case type() | types.FunctionType() | types.MethodType() | types.BuiltinFunctionType():
                words = name_of(x)
            case _ if shape is not None:
                words = f"{kind}{shape}"
            case _ if dataclasses.is_dataclass(x) or kind in ("SimpleNamespace", "Namespace"):
                words = f"{kind}({self._attributes(x, level)})"
            case _:
                words = super().repr_instance(x, level) if type(x).__module__ in PLAIN_MODULES else kind
        return words

    def _attributes(self, x: Any, level: int) -> str:
        if level <= 0:
            return "..."
        names = [field.name for field in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else list(vars(x))
        held = itertools.islice(without_secrets((name, getattr(x, name, None)) for name in names), MAX_ITEMS)
        return ", ".join(f"{name}={self.repr1(value, level - 1)}" for name, value in held)
