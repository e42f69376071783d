"""Containers as annotations describe them: whether a typed literal is one, and what to type instead."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["container_fits", "container_words", "is_container"]

EXAMPLES: dict[Any, str] = {
    list: "[1, 2]",
    tuple: "(1, 2)",
    dict: "{'a': 1}",
    set: "{1, 2}",
    frozenset: "{1, 2}",
    Mapping: "{'a': 1}",
    Sequence: "[1, 2]",
}
"""An example of each container."""
TYPES: dict[Any, tuple[type, ...]] = {frozenset: (set, frozenset), Mapping: (dict,), Sequence: (list, tuple)}
"""Types of the literals that stand for a container; for all others, the container itself."""
PLAIN: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,), bytes: (bytes,)}
"""Types of the literals that stand for an element; an element with another annotation is not checked."""


def is_container(annotation: Any) -> bool:
    """Return True for `list`, `dict[str, int]` and the like."""
    return any(_kind_of(annotation) is each for each in EXAMPLES)


def container_fits(annotation: Any, value: Any) -> bool:
    """Return True if a literal is what the annotation says, as far as it names built-in types."""
    if annotation is None or annotation is type(None):
        return value is None
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(container_fits(member, value) for member in typing.get_args(annotation))
    if is_container(annotation):
        kind = _kind_of(annotation)
        return isinstance(value, TYPES.get(kind, (kind,))) and _elements_fit(kind, typing.get_args(annotation), value)
    if isinstance(annotation, type) and annotation in PLAIN:
        return type(value) in PLAIN[annotation]
    return True


def container_words(annotation: Any) -> str:
    """Return `a literal of type list[int], such as [1, 2]`."""
    name = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else repr(annotation)
    name = name.replace("collections.abc.", "").replace("typing.", "")
    return f"a literal of type {name}, such as {EXAMPLES[_kind_of(annotation)]}"


def _kind_of(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation


def _elements_fit(kind: Any, arguments: tuple[Any, ...], value: Any) -> bool:
    if not arguments:
        return True
    if kind is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        pairs = zip(arguments, value, strict=False)
        return len(value) == len(arguments) and all(container_fits(of, each) for of, each in pairs)
    if kind in (dict, Mapping):
        return all(container_fits(of, each) for pair in value.items() for of, each in zip(arguments, pair, strict=True))
    return all(container_fits(arguments[0], each) for each in value)
