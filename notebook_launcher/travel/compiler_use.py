"""Whether a call will import torch's compiler, as far as its code tells before it runs.

The first optimizer of a process imports `torch._dynamo`, and so do `DistributedDataParallel` and `fully_shard`: 1.6 s
of a core. A fork server that knows it beforehand imports the compiler once, and not each rank on its own.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING

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
MOST_LOOKED_AT = 100
"""Functions and classes that are looked at: a few microseconds each."""


def uses_compiler(call: FunctionCall) -> bool:
    """Return True if the code of a call, or of functions of the same module that it uses, has one of the names.

    A wrong answer costs time alone: 1.6 s before the ranks start, or as much in every rank.
    """
    function = call.fn
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None)
    waiting, seen = [call.fn, *call.args, *call.kwargs.values()], set[int]()
    while waiting and len(seen) < MOST_LOOKED_AT:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            waiting.append(value.__func__)
        elif isinstance(value, types.FunctionType) and value.__module__ in ("__main__", home):
            names = set(_names(value.__code__))
            if names & WORDS:
                return True
            waiting += [value.__globals__[name] for name in names if name in value.__globals__]
            waiting += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        elif isinstance(value, type):
            if value.__name__ in WORDS:  # It was imported by another name.
                return True
            if value.__module__ in ("__main__", home):
                waiting += vars(value).values()
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function's code mentions, with those of the functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
