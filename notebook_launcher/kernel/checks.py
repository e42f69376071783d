"""What can be found wrong with a function and its arguments before any process starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from notebook_launcher import context
from notebook_launcher.errors import CallOrderError, ConfigError

__all__ = ["check_call", "check_not_in_rank", "name_of"]


def name_of(function: Any) -> str:
    """Return what the user would call the function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__name__


def check_not_in_rank(what: str) -> None:
    """Raise `CallOrderError` if this process is a rank."""
    rank = context.current()
    if rank is not None:
        msg = (
            f"{what} was called inside rank {rank.rank}, which is itself part of a launch. A rank cannot launch "
            "ranks: call it in the notebook, and let the function do the work of one rank."
        )
        raise CallOrderError(msg)


def check_call(function: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `args` and `kwargs` as a call takes them; raises `ConfigError` if the call cannot work."""
    args, kwargs = _arguments(args, kwargs)
    if not callable(function):
        hint = " Pass the function itself, without calling it." if function is None else ""
        msg = f"fn={_short(function)} is a {type(function).__name__}, not something that can be called.{hint}"
        raise ConfigError(msg)
    _check_kind(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return args, kwargs  # Some functions written in C have no signature.
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        msg = (
            f"{name_of(function)}{signature} cannot be called with args={_short(args)}, kwargs={_short(kwargs)}: "
            f"{error}. Nothing was started. Arguments go by name: notebook_launch(fn, 2, args=(...), kwargs={{...}})."
        )
        raise ConfigError(msg) from None
    return args, kwargs


def _arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(args, (tuple, list)):
        msg = f"args={_short(args)} is a {type(args).__name__}; it must be a tuple. Write args=({_short(args)},)."
        raise ConfigError(msg)
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        msg = f"kwargs={_short(kwargs)} must map the names of arguments to their values. Write kwargs={{'lr': 0.1}}."
        raise ConfigError(msg)
    return tuple(args), dict(kwargs)


def _check_kind(function: Any) -> None:
    bare = function
    while isinstance(bare, functools.partial):
        bare = bare.func
    call = bare if inspect.isroutine(bare) or isinstance(bare, type) else getattr(bare, "__call__", bare)  # noqa: B004
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        msg = (
            f"{name_of(function)} is a coroutine function (async def); a rank calls plain functions. Wrap it: "
            f"def main(): return asyncio.run({name_of(function)}())."
        )
        raise ConfigError(msg)
    if inspect.isgeneratorfunction(call):
        msg = (
            f"{name_of(function)} is a generator function (it has a yield), so calling it runs nothing. Collect and "
            "return the values instead."
        )
        raise ConfigError(msg)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a broken repr must not hide the error that is being explained
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."
