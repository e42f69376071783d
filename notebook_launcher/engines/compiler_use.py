"""A guess whether a call will import torch's compiler, by the names in its code.

The first optimizer of a process imports `torch._dynamo`, and so do `DistributedDataParallel` and `fully_shard`: 1.6 s
of a core. A fork server that knows it beforehand imports the compiler once, and not each rank on its own.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from notebook_launcher.travel.function_call import FunctionCall

__all__ = ["uses_compiler"]

WORDS = frozenset(
    {"optim", "torch.optim", "SGD", "Adam", "AdamW"}
    | {"DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"}
    | {"Accelerator", "Fabric", "Trainer"}
)
"""Names whose use makes an optimizer or a distributed model."""
MAX_LOOKED_AT = 100
"""Functions and classes that are looked at: a few microseconds each."""


def uses_compiler(call: FunctionCall) -> bool:
    """Return True if the code of a call, or of functions of the same module that it uses, has one of the names.

    A wrong answer costs time alone: 1.6 s before the ranks start, or as much in every rank.
    """
    waiting = [inner for value in (call.fn, *call.args, *call.kwargs.values()) for inner in _inside(value)]
    homes, seen = {"__main__", getattr(waiting[0], "__module__", None)}, set[int]()
    while waiting and len(seen) < MAX_LOOKED_AT:
        value = waiting.pop()
        if id(value) in seen or not isinstance(value, types.FunctionType | type):
            continue
        seen.add(id(value))
        names = set(_names(value))
        if names & WORDS:
            return True
        if value.__module__ in homes:
            waiting += [inner for used in _used_by(value, names) for inner in _inside(used)]
    return False


def _inside(value: Any) -> Iterator[Any]:
    """Yield the function inside a method, or inside a partial function with its arguments; else the value itself."""
    if isinstance(value, functools.partial):
        yield from _inside(value.func)
        yield from (*value.args, *value.keywords.values())
    else:
        yield value.__func__ if isinstance(value, types.MethodType) else value


def _names(value: types.FunctionType | type) -> Iterator[str]:
    """Yield the name of a class, or the names that a function mentions."""
    if isinstance(value, type):  # The code may know the class by another name.
        yield value.__name__
    else:
        yield from _names_in(value.__code__)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _used_by(value: types.FunctionType | type, names: set[str]) -> Iterator[Any]:
    """Yield the attributes of a class, or the variables that a function uses from outside."""
    if isinstance(value, type):
        yield from vars(value).values()
        return
    yield from (value.__globals__[name] for name in names if name in value.__globals__)
    unset = types.CellType()
    yield from (cell.cell_contents for cell in value.__closure__ or () if cell != unset)
