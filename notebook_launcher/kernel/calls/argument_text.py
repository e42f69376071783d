"""A function's arguments in a few words each, for people who compare runs; the function cannot be called from them."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any

from notebook_launcher.wording.secret_text import without_secrets
from notebook_launcher.wording.value_text import describe_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["describe_arguments"]

MAX_ARGUMENTS = 64


def describe_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return each argument in a few words, by name, including defaults and the arguments of a `functools.partial`.

    Arguments with names of secrets (`api_key`) are left out.
    """
    while isinstance(function, functools.partial):
        args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
    named = without_secrets(_bind(function, args, kwargs).items())
    return {name: describe_value(value) for name, value in itertools.islice(named, MAX_ARGUMENTS)}


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
