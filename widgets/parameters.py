"""The parameters of a function, as fields that can be typed into.

What a field takes follows the annotation, else the default: `bool`, `int`, `float`, `str`, `Literal`, an
`Enum`, each also as `Optional`. Everything else is typed as a Python literal (`[1, 2]`, `{"a": 1}`), and
what has no literal, a model for instance, comes from code: `panel.arguments["model"] = model`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

__all__ = ["MISSING", "Parameter", "is_literal", "parameters_of", "takes_any_name"]

MISSING: Any = inspect.Parameter.empty
"""Stands for a value that is not there."""

Kind = Literal["bool", "int", "float", "str", "choice", "literal", "code"]
PLAIN: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}
LITERALS = (list, tuple, dict, set, frozenset, Mapping, Sequence)
LITERAL_TYPES = (type(None), bool, int, complex, str, bytes, list, tuple, dict, set)
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "literal": "a Python literal, such as 3, 'text' or [1, 2]",
}
LONGEST = 1000
"""Characters of a literal that may still be typed, or shown in a line of code."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function."""

    name: str
    kind: Kind
    default: Any = MISSING
    optional: bool = False
    """Whether None is a value: a field that is left empty means it."""
    choices: tuple[Any, ...] = ()
    positional_only: bool = False

    @property
    def is_required(self) -> bool:
        """Whether the function cannot be called without it."""
        return self.default is MISSING

    def parse(self, text: str) -> Any:
        """Return the value of what was typed, `MISSING` for nothing; raises ValueError, which says why."""
        if self.kind == "str":
            return None if self.optional and not text else text
        text = text.strip()
        if not text:
            return None if self.optional else MISSING
        if self.optional and text == "None":
            return None
        try:
            value = float(text) if self.kind == "float" else ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = MISSING
        is_number = self.kind != "int" or (isinstance(value, int) and not isinstance(value, bool))
        if value is MISSING or not is_number:
            hint = f" Write {int(value)}." if isinstance(value, float) and value.is_integer() else ""
            msg = f"{self.name}={text} is not {WORDS[self.kind]}.{hint}"
            raise ValueError(msg)
        return value

    def text_of(self, value: Any) -> str:
        """Return what is typed for a value; empty for one that is left out."""
        if value is MISSING or value is None:
            return ""
        plain = {"str": str, "int": int, "float": float}.get(self.kind)
        return str(value) if self.kind == "str" else repr(value if plain is None else plain(value))

    def fits(self, value: Any) -> bool:
        """Whether a field of this kind can show a value; one that comes from code need not."""
        if value is MISSING or (value is None and (self.optional or self.kind == "literal")):
            return True
        fitting: dict[Kind, Callable[[], bool]] = {
            "bool": lambda: isinstance(value, bool),
            "choice": lambda: value in self.choices,
            "str": lambda: isinstance(value, str) and "\n" not in value,
            "int": lambda: isinstance(value, int) and not isinstance(value, bool),
            "float": lambda: isinstance(value, (int, float)) and not isinstance(value, bool),
            "literal": lambda: is_literal(value),
            "code": lambda: False,
        }
        return fitting[self.kind]()


def parameters_of(function: Any) -> tuple[Parameter, ...]:
    """Return the parameters that can be given by name or place; none where a function has no signature."""
    signature = _signature(function)
    names = _namespace(function)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(_parameter(each, names) for each in signature if each.kind not in kinds)


def takes_any_name(function: Any) -> bool:
    """Whether the function has `**kwargs`."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in _signature(function))


def is_literal(value: Any) -> bool:
    """Whether the value's repr is Python that gives it back, and short enough for a line of code."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) not in LITERAL_TYPES or (hasattr(value, "__len__") and len(value) > LONGEST):
        return False  # Asked at each stroke of a key, so no foreign repr is called.
    inside = [*value, *value.values()] if type(value) is dict else value if type(value) in LITERALS else ()
    if not all(map(is_literal, inside)):
        return False
    try:
        text = repr(value)
        return len(text) <= LONGEST and bool(ast.literal_eval(text) == value)
    except Exception:  # noqa: BLE001 - whatever a foreign repr or comparison does, it is no literal
        return False


def _signature(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []  # None, and some functions written in C


def _namespace(function: Any) -> dict[str, Any]:
    """Return the globals that a function's string annotations are read in."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    holder = getattr(function, "__init__" if isinstance(function, type) else "__func__", function)
    if not hasattr(holder, "__globals__"):
        holder = vars(type(holder)).get("__call__", holder)
    return dict(getattr(holder, "__globals__", {}))


def _parameter(parameter: inspect.Parameter, names: dict[str, Any]) -> Parameter:
    annotation, optional = _without_none(_resolve(parameter.annotation, names))
    kind, choices = _kind(annotation, parameter.default)
    optional = optional or parameter.default is None
    if kind == "bool" and (optional or parameter.default is MISSING):
        kind, choices = "choice", (False, True)  # a checkbox has no third state
    if kind == "choice" and optional and None not in choices:
        choices = (None, *choices)
    if kind == "choice" and parameter.default is not MISSING and parameter.default not in choices:
        choices = (parameter.default, *choices)
    return Parameter(
        name=parameter.name,
        kind=kind,
        default=parameter.default,
        optional=optional,
        choices=choices,
        positional_only=parameter.kind is inspect.Parameter.POSITIONAL_ONLY,
    )


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    """Return what a string annotation stands for; nothing for one that cannot be read."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, {**vars(typing), **names})  # noqa: S307 - the user's own code, as typing does
        except Exception:  # noqa: BLE001 - a name that exists only for the type checker
            return MISSING
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return getattr(annotation, "__supertype__", annotation)  # of a NewType


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    members = typing.get_args(annotation)
    others = [member for member in members if member is not type(None)]
    optional = len(others) < len(members)
    if set(others) == {int, float}:
        others = [float]
    inner = others[0] if len(others) == 1 else MISSING
    if inner is MISSING and set(others) <= set(PLAIN):
        inner = list  # int | str: typed as a literal
    return inner, optional


def _kind(annotation: Any, default: Any) -> tuple[Kind, tuple[Any, ...]]:
    if typing.get_origin(annotation) is Literal:
        return "choice", typing.get_args(annotation)
    enumeration = type(default) if isinstance(default, enum.Enum) else annotation
    if isinstance(enumeration, type) and issubclass(enumeration, enum.Enum):
        return "choice", tuple(enumeration)
    plain = type(default) if annotation in (MISSING, Any) else annotation
    if isinstance(plain, type) and plain in PLAIN:
        return PLAIN[plain], ()
    if annotation in (MISSING, Any) and default is MISSING:
        return "literal", ()
    takes_literals = any((typing.get_origin(annotation) or annotation) is each for each in LITERALS)
    is_one = default is not MISSING and is_literal(default) and (default is not None or annotation in (MISSING, Any))
    return ("literal" if takes_literals or is_one else "code"), ()
