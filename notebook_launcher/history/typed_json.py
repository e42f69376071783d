"""Values of JSON as a dataclass with annotations has them; a file that anybody changed gives one kind of error."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from notebook_launcher.wording.text import one_line

__all__ = ["LARGEST", "decode_record", "number_of"]

LARGEST = 2**53
"""Bound of whole numbers, so that they can be drawn and divided."""
DEPTH = 16
"""Levels of lists and objects in a field of any type."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")

T = TypeVar("T")


def decode_record(kind: type[T], data: Any) -> T:
    """Return a record from its fields by name, without those that the class does not know.

    Raises:
        ValueError: A field is missing, or is not what its annotation says.
    """
    known: dict[str, Any] = {}
    given = _checked(data, isinstance(data, Mapping))
    for name, converter in _converters(kind).items():  # type: ignore[arg-type] # a class is hashable
        if name in given:
            try:
                known[name] = converter(given[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(str(error).partition("() ")[2]) from None


def number_of(value: Any) -> float:
    """Return a number, which JSON has as text if it is not finite; raises `ValueError`."""
    if value is None:
        return math.nan
    return float(_checked(value, isinstance(value, int | float) or value in NOT_FINITE))


@functools.cache
def _converters(kind: type[Any]) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(kind, localns={"Mapping": Mapping})
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(kind)}


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return the function that makes a value of an annotation, or raises `ValueError`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (some,) = (_converter(each) for each in inner if each is not types.NoneType)
        return lambda value: None if value is None else some(value)
    if origin is Mapping:
        return functools.partial(_mapping, KEYS[inner[0]], _converter(inner[1]))
    if origin is tuple:
        items = [_converter(each) for each in inner if each is not ...]
        return functools.partial(_tuple, items[0]) if inner[-1] is ... else functools.partial(_pair, items)
    if origin is Literal:
        return lambda value: _checked(value, isinstance(value, str) and value in inner)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(decode_record, hint)
    return PLAIN[hint]


def _mapping(key: Callable[[str], Any], item: Callable[[Any], Any], value: Any) -> dict[Any, Any]:
    return {key(name): item(each) for name, each in _checked(value, isinstance(value, Mapping)).items()}


def _tuple(item: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    return tuple(map(item, _checked(value, isinstance(value, list | tuple))))


def _pair(items: list[Callable[[Any], Any]], value: Any) -> tuple[Any, ...]:
    values = _checked(value, isinstance(value, list | tuple) and len(value) == len(items))
    return tuple(item(each) for item, each in zip(items, values, strict=True))


def _anything(value: Any) -> Any:
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, list | Mapping)]:
        depth += 1
        _checked(value, depth <= DEPTH)
        level = [item for each in level for item in (each.values() if isinstance(each, Mapping) else each)]
    return value


def _text(value: Any) -> Any:
    return _checked(value, isinstance(value, str))


def _integer(value: Any) -> Any:
    return _checked(value, isinstance(value, int | float) and abs(value) < LARGEST)


def _number(value: Any) -> Any:
    return value if isinstance(value, int) and abs(value) < LARGEST else number_of(value)


def _checked(value: Any, is_right: bool) -> Any:
    if not is_right:
        shown = f"it is of {type(value).__name__}" if isinstance(value, list | Mapping) else one_line(repr(value), 40)
        raise ValueError(shown)
    return value


PLAIN: dict[Any, Callable[[Any], Any]] = {
    Any: _anything,
    bool: lambda value: _checked(value, isinstance(value, bool)),
    float: _number,
    int: _integer,
    str: _text,
}
KEYS: dict[Any, Callable[[str], Any]] = {
    int: lambda name: int(_checked(name, name.isdecimal() and len(name) < 10)),
    str: _text,
}
