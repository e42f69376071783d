"""Finds variables of the user's modules that were given another value after the import, such as `config.lr = 0.01`.

Modules travel by name: ranks import them, and have the value of the file. The file shows this value where it is a
plain number or text, or a dictionary with such values, so nothing has to be imported again for the comparison. A
variable that functions of the module assign themselves (`global`), or that its code assigns twice, is left out.
"""

from __future__ import annotations

import ast
import collections
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_launcher.travel.changed_modules import local_modules

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator, Mapping

__all__ = ["variables_set_in_modules"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def variables_set_in_modules(fd: int) -> list[str]:
    """Return the public variables, by module, that a packed call may use and that no longer have their file's value.

    An entry of a dictionary is named as in code: `"config.RATES['lr']"`.

    Args:
        fd: Descriptor of the call's parcel, which stays open.
    """
    return sorted(name for module in local_modules(fd) for name in _variables_set_in(module))


def _variables_set_in(module: types.ModuleType) -> list[str]:
    path = str(module.__file__)
    try:
        status = os.stat(path)
        written = _written_values(path, status.st_mtime_ns, status.st_size)
    except (OSError, SyntaxError, ValueError):
        return []
    present = vars(module)
    return [
        f"{module.__name__}.{name}"
        for variable, value in written.items()
        if variable in present
        for name in _differences(variable, value, present[variable])
    ]


def _differences(variable: str, written: Any, present: Any) -> Iterator[str]:
    if not isinstance(written, dict):
        if not _is_same(present, written):
            yield variable
    elif isinstance(present, dict):
        # An entry that was added or removed is the module's own affair more often than not: a cache, a registry.
        for key, value in written.items():
            if isinstance(value, PLAIN) and key in present and not _is_same(present[key], value):
                yield f"{variable}[{key!r}]"


def _is_same(present: Any, written: Any) -> bool:
    return type(present) is type(written) and bool(present == written)


@functools.lru_cache(maxsize=256)
def _written_values(path: str, mtime: int, size: int) -> Mapping[str, Any]:  # noqa: ARG001 - they name the version
    """Return the plain values that a file assigns once to public variables at its top level."""
    tree = ast.parse(Path(path).read_bytes(), path)
    values: dict[str, Any] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression):
                pass
            case _:
                continue
        try:
            values[name] = ast.literal_eval(expression)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    assigned = collections.Counter(_assigned_names(tree))
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (*PLAIN, dict)) and assigned[name] == 1 and not name.startswith("_")
    }


def _assigned_names(tree: ast.Module) -> Iterator[str]:
    """Yield each name as often as code of the module itself may assign its variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
                continue  # What is assigned inside is local.
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name
            case _:
                pass
        pending.extend(ast.iter_child_nodes(node))
