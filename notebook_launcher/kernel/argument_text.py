"""A function's arguments in a few words each, for people who compare runs; the function cannot be called from them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import numbers
import reprlib
import types
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from notebook_launcher.kernel.checks import name_of
from notebook_launcher.kernel.display.formatting import SECRET
from notebook_launcher.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["describe_arguments", "describe_value"]

MAX_ARGUMENTS = 64
MAX_TEXT = 80
MAX_ITEMS = 6
PLAIN_MODULES = ("torch", "datetime")
"""Modules with types whose values are one word each (`torch.bfloat16`) and have no `shape`."""


def describe_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return each argument in a few words, by name, including defaults and the arguments of a `functools.partial`.

    Arguments with names of secrets (`api_key`) are left out.
    """
    while isinstance(function, functools.partial):
        args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
    named = _without_secrets(_bind(function, args, kwargs).items())
    return {name: describe_value(value) for name, value in itertools.islice(named, MAX_ARGUMENTS)}


def describe_value(value: Any) -> str:
    """Return `0.1`, `[1, 2, 3]`, `Tensor(3, 4)` or `Linear`.

    The value's own `repr` is not called: it may take long, fail, or copy data from a GPU.
    """
    try:
        return one_line(_Words().repr(value), MAX_TEXT)
    except Exception:  # noqa: BLE001 - an attribute of a foreign object may do anything
        return type(value).__name__


def _bind(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return {**{f"argument {place}": value for place, value in enumerate(args, 1)}, **kwargs}
    bound.apply_defaults()
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kinds[name] is not inspect.Parameter.VAR_POSITIONAL or value:
            named[name] = value
    return named


def _without_secrets(items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
    return ((name, value) for name, value in items if not SECRET.search(str(name)))


class _Words(reprlib.Repr):
    """The standard library's short forms of strings, numbers and lists; for other objects the type and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = MAX_TEXT

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        # Unlike in the standard library, keys are not sorted: there may be millions of them.
        items = itertools.islice(_without_secrets(x.items()), MAX_ITEMS)
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in items]
        return f"{{{', '.join([*shown, *['...'] * (len(x) > len(shown))])}}}" if level > 0 or not x else "{...}"

    def repr_set(self, x: Any, level: int) -> str:  # noqa: ARG002 - as reprlib calls it
        return f"{type(x).__name__} of {len(x):,}"

    repr_frozenset = repr_set

    def repr_instance(self, x: Any, level: int) -> str:
        kind = type(x).__name__
        shape = getattr(x, "shape", None)
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
            case _ if isinstance(shape, tuple):
                words = f"{kind}{tuple(shape)}"
            case _ if dataclasses.is_dataclass(x) or kind in ("SimpleNamespace", "Namespace"):
                words = f"{kind}({self._attributes(x, level)})"
            case _:
                words = super().repr_instance(x, level) if type(x).__module__ in PLAIN_MODULES else kind
        return words

    def _attributes(self, x: Any, level: int) -> str:
        if level <= 0:
            return "..."
        names = [field.name for field in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else list(vars(x))
        held = itertools.islice(_without_secrets((name, getattr(x, name, None)) for name in names), MAX_ITEMS)
        return ", ".join(f"{name}={self.repr1(value, level - 1)}" for name, value in held)
