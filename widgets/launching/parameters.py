"""Parameters of a function as fields of a form.

The kind of a field follows the annotation, else the default: `bool`, `int`, `float`, `str`, `Path`, `Literal`, an
`Enum`, each also as `Optional`. Other values are typed as a Python literal (`[1, 2]`, `{"a": 1}`). A parameter of
unknown type, such as `path=None`, takes a bare word too. A value without a literal, a model for instance, comes from
code: `panel.arguments["model"] = model`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import json
import math
import os
import sys
import types
import typing
from collections import UserDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from notebook_launcher.config import LaunchConfig
from notebook_launcher.engines.cluster import command_engines
from notebook_launcher.kernel.calls.checks import called_signature
from notebook_launcher.settings.option_checks import NUMBERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher.settings.option_checks import OptionNumber


MISSING: Any = inspect.Parameter.empty
"""Stands for a value that was not given."""

Kind = Literal["bool", "int", "float", "str", "path", "choice", "literal", "code"]
PLAIN: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "str", Path: "path", PurePath: "path"}
PATHS = (Path, PurePath, os.PathLike)
LITERAL_TYPES = (type(None), bool, int, complex, str, bytes, list, tuple, dict, set)
EXAMPLES: dict[Any, str] = {
    list: "[1, 2]",
    tuple: "(1, 2)",
    dict: "{'a': 1}",
    set: "{1, 2}",
    frozenset: "{1, 2}",
    Mapping: "{'a': 1}",
    Sequence: "[1, 2]",
}
"""A literal for each container that an annotation can name."""
TYPES: dict[Any, tuple[type, ...]] = {frozenset: (set, frozenset), Mapping: (dict,), Sequence: (list, tuple)}
"""Types of the literals that stand for a container; for all others, the container itself."""
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "literal": "a Python literal, such as 3, 'text' or [1, 2]",
}
OPENING = tuple("[({'\"")
"""Characters with which a literal begins and a bare word does not."""
_TEXT_OR_NUMBER, _NUMBERS = object(), object()
"""Stand for unions such as `int | str` and `int | bool`, whose values are typed as literals."""
MAX_LITERAL = 1000
"""Characters of the longest literal that can be typed, or shown in a line of code."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function."""

    name: str
    kind: Kind
    default: Any = MISSING
    optional: bool = False
    """True if None is a value; an empty field then means None."""
    choices: tuple[Any, ...] = ()
    positional_only: bool = False
    takes_words: bool = False
    """True if a text that is not a literal is a value: the text itself."""
    container: Any = MISSING
    """Annotation: of a list, dictionary or the like, a typed value has to be one."""
    is_behind_wrapper: bool = False
    """True if a decorator passes the parameter on, and may give a value itself."""

    @property
    def is_required(self) -> bool:
        """True if the function cannot be called without this parameter."""
        return self.default is MISSING and not self.is_behind_wrapper

    @property
    def empty(self) -> Any:
        """Value that an empty field means; `MISSING` if an empty field has no value."""
        value = self.parse("")
        return self.default if value is MISSING else value

    def parse(self, text: str) -> Any:
        """Return the value of a text, `MISSING` for an empty one; raises ValueError with what to type instead."""
        if self.kind == "str":
            return None if self.optional and not text else text
        text = text.strip()
        if not text:
            return None if self.optional else MISSING
        if self.optional and text == "None":
            return None
        if self.kind == "path":
            return Path(text)
        value = _literal(text, float if self.kind == "float" else ast.literal_eval)
        if self.kind == "int" and isinstance(value, float) and value.is_integer():
            value = int(value)  # such as 1e3
        is_number = self.kind != "int" or (isinstance(value, int) and not isinstance(value, bool))
        if value is MISSING and self.takes_words and not text.startswith(OPENING):
            return text
        if value is MISSING or not is_number:
            raise ValueError(f"Enter {WORDS[self.kind]}.")
        kind = _kind_of(self.container)
        if kind in EXAMPLES and not isinstance(value, TYPES.get(kind, kind)):
            is_plain = isinstance(self.container, type) and not typing.get_args(self.container)
            name = self.container.__name__ if is_plain else repr(self.container)
            name = name.replace("collections.abc.", "").replace("typing.", "")
            raise ValueError(f"Enter a literal of type {name}, such as {EXAMPLES[kind]}.")
        return value

    def reading(self, text: str) -> str:
        """Return a note on how a text is read, if that may surprise; else an empty text."""
        text = text.strip()
        if self.kind == "str":
            if self.optional and text == "None":
                return 'Read as the text "None". Empty the field for None.'
            is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            return "The quotes are read as part of the text. Leave them out." if is_quoted else ""
        if not self.takes_words or not text:
            return ""
        value = _literal(text)
        if value is MISSING and not text.startswith(OPENING):
            truth = f" Write {text.capitalize()} for the truth value." if text.lower() in ("true", "false") else ""
            return f"Read as the text {json.dumps(text, ensure_ascii=False)}.{truth}"
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return f'Read as a number. Write "{text}" for a text.' if is_number else ""

    def text_of(self, value: Any) -> str:
        """Return the text that is typed for a value; empty for None and for a value that is left out."""
        if value is MISSING or value is None:
            return ""
        plain = {"int": int, "float": float}.get(self.kind)
        return str(value) if self.kind in ("str", "path") else repr(value if plain is None else plain(value))

    def fits(self, value: Any) -> bool:
        """Return True if the field can show a value; some values from code cannot be typed."""
        if value is MISSING or (value is None and (self.optional or self.kind == "literal")):
            return True
        match self.kind:
            case "choice":
                return value in self.choices
            case "literal":
                return is_literal(value)
            case "str" | "path":
                types = str if self.kind == "str" else (str, PurePath)
                return isinstance(value, types) and "\n" not in str(value)
            case "int" | "float":
                return type(value) is not bool and isinstance(value, int if self.kind == "int" else (int, float))
        return self.kind == "bool" and isinstance(value, bool)


def signature_parameters(function: Any) -> tuple[Parameter, ...]:
    """Return the parameters that can be given by name or place; none if the function has no signature.

    A decorator's `*args, **kwargs` stand for the parameters of the function that it wraps.
    """
    signature, names = _signature(function), _namespace(function)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    is_wrapper = [each.kind for each in signature] == [*kinds]
    if is_wrapper:
        signature = list(inspect.signature(function).parameters.values())  # That of the function that it wraps.
    found = (_parameter(each, names) for each in signature if each.kind not in kinds)
    return tuple(dataclasses.replace(each, is_behind_wrapper=is_wrapper) for each in found)


def takes_any_name(function: Any) -> bool:
    """Return True if the function has `**kwargs`."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in _signature(function))


def is_literal(value: Any) -> bool:
    """Return True if the value's repr is Python code for it, and short enough for a line of code."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) not in LITERAL_TYPES or (hasattr(value, "__len__") and len(value) > MAX_LITERAL):
        return False  # Asked at each stroke of a key, so no foreign repr is called.
    plain = value if type(value) in (list, tuple, set) else ()
    inside = [*value, *value.values()] if type(value) is dict else plain
    if not all(map(is_literal, inside)):
        return False
    try:
        text = repr(value)
        return len(text) <= MAX_LITERAL and bool(ast.literal_eval(text) == value)
    except Exception:  # whatever a foreign repr or comparison does, it is not a literal
        return False


def _literal(text: str, read: Callable[[str], Any] = ast.literal_eval) -> Any:
    """Return the value of a literal; `MISSING` if the text is none."""
    try:
        return read(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return MISSING


def _signature(function: Any) -> list[inspect.Parameter]:
    try:
        return list(called_signature(function).parameters.values())
    except (TypeError, ValueError):
        return []  # None, and some functions written in C


def _namespace(function: Any) -> dict[str, Any]:
    """Return the globals that a function's string annotations are read in."""
    while isinstance(function, functools.partial):
        function = function.func
    return vars(sys.modules.get(getattr(function, "__module__", ""), typing))


def _parameter(parameter: inspect.Parameter, names: dict[str, Any]) -> Parameter:
    default = parameter.default
    annotation, optional = _without_none(_resolve(parameter.annotation, names))
    kind, choices = _kind(annotation, default)
    optional = optional or default is None
    if kind == "bool" and (optional or default is MISSING):
        kind, choices = "choice", (False, True)  # a checkbox has no third state
    if kind == "choice" and optional and None not in choices:
        choices = (None, *choices)
    if kind == "choice" and default is not MISSING and default not in choices:
        choices = (default, *choices)
    # A text may be meant if the type is not known, or if one of several is `str`.
    may_be_text = annotation is _TEXT_OR_NUMBER or (annotation in (MISSING, Any) and default in (None, MISSING))
    return Parameter(
        name=parameter.name,
        kind=kind,
        default=default,
        optional=optional,
        choices=choices,
        positional_only=parameter.kind is inspect.Parameter.POSITIONAL_ONLY,
        takes_words=kind == "literal" and may_be_text,
        container=annotation,
    )


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    """Return the type that an annotation stands for; `MISSING` for a string that cannot be read."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, {**vars(typing), **names})  # noqa: S307 - the user's own code, as typing does
        except Exception:  # a name that exists only for the type checker
            return MISSING
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    annotation = getattr(annotation, "__value__", annotation)  # of a `type` statement
    return getattr(annotation, "__supertype__", annotation)  # of a NewType


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    members = typing.get_args(annotation)
    others = [member for member in members if member is not type(None)]
    optional = len(others) < len(members)
    if set(others) == {int, float}:
        others = [float]
    if str in others and all(each is str or _kind_of(each) in PATHS for each in others):
        others = [str]
    inner = _resolve(others[0], {}) if len(others) == 1 else MISSING
    if inner is MISSING and set(others) <= set(PLAIN):
        inner = _TEXT_OR_NUMBER if str in others else _NUMBERS  # typed as a literal
    return inner, optional


def _kind_of(annotation: Any) -> Any:
    """Return `list` for `list[int]`; an annotation without a hash, such as `[1]`, is of no kind."""
    kind = typing.get_origin(annotation) or annotation
    return kind if isinstance(kind, Hashable) else MISSING


def _kind(annotation: Any, default: Any) -> tuple[Kind, tuple[Any, ...]]:
    if typing.get_origin(annotation) is Literal:
        return "choice", typing.get_args(annotation)
    enumeration = type(default) if isinstance(default, enum.Enum) else annotation
    if isinstance(enumeration, type) and issubclass(enumeration, enum.Enum):
        return "choice", tuple(enumeration)
    plain = type(default) if annotation in (MISSING, Any) else annotation
    plain = Path if _kind_of(plain) in PATHS or isinstance(default, PurePath) else plain
    if isinstance(plain, type) and plain in PLAIN:
        return PLAIN[plain], ()
    if annotation in (MISSING, Any) and default is MISSING:
        return "literal", ()
    takes_literals = annotation in (_TEXT_OR_NUMBER, _NUMBERS) or _kind_of(annotation) in EXAMPLES
    is_one = default is not MISSING and is_literal(default) and (default is not None or annotation in (MISSING, Any))
    return ("literal" if takes_literals or is_one else "code"), ()


# --------------------------------------------------------------------------------------------------------------------
# Numbers that are typed into the fields of options, with the words for a text that is not a number.


def default_of(name: str) -> Any:
    """Return the default of an option."""
    return next(field.default for field in dataclasses.fields(LaunchConfig) if field.name == name)


def reads(name: str, text: str) -> Any:
    """Return the value of an option's text: the default for an empty one; raises ValueError with what to type."""
    if name == "engine":
        return command_engines.read(text)
    default, text = default_of(name), text.strip()
    return default if not text or (text == "None" and default is None) else _read(text, NUMBERS[name])


def _read(text: str, number: OptionNumber) -> int | float:
    value = _literal(text)
    value = _literal(text, float) if value is MISSING else value  # Only this reads inf, and only the other 0x10.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and number.is_whole:
        is_number = isinstance(value, int) or value.is_integer()
    if not is_number or not number.least <= value <= (math.inf if number.most is None else number.most):
        raise ValueError(f"Enter {number.words}.")
    if not number.is_whole and not 0 < value < math.inf:
        raise ValueError(f"Enter {number.words}.")
    return int(value) if number.is_whole else value


# --------------------------------------------------------------------------------------------------------------------
# The arguments of the function that a panel launches.


class Arguments(UserDict[str, Any]):
    """The arguments of the function: a value for each name that was set. Others keep their defaults."""

    def __init__(self, check: Callable[[str], None], changed: Callable[[str | None], None]) -> None:
        super().__init__()
        self._check = check
        self._changed = changed

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        self.data[name] = value
        self._changed(name)

    def __delitem__(self, name: str) -> None:
        del self.data[name]
        self._changed(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.data))  # A message of the page may change them meanwhile.

    def replace(self, values: Mapping[str, Any]) -> None:
        """Set all at once; raises `ConfigError` for a name that the function does not take."""
        for name in values:
            self._check(name)
        self.data = dict(values)
        self._changed(None)
