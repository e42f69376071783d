"""Finds modules beside the notebook that changed on disk since the kernel imported them.

Modules travel by name, so the ranks run the file as it is now while the kernel still runs the earlier version. A change
is detected by the code of the module's functions, and by plain values that the file assigns.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import importlib.machinery
import os
import site
import sys
import sysconfig
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from notebook_launcher.tracebacks import PACKAGE_FOLDER
from notebook_launcher.travel import cells
from notebook_launcher.travel.parcel import read_notes
from notebook_launcher.travel.replacements import replaced_attributes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def stale_modules(fd: int | None) -> list[str]:
    """Return the files that a packed call uses and that changed since this process imported them.

    Args:
        fd: Descriptor of the call's parcel, which stays open. None: a fork inherits the call, which may use everything
            that this process has imported.
    """
    names = list(sys.modules) if fd is None else list(read_notes(fd).modules)
    return sorted(str(module.__file__) for module in _local_among(names) if _has_changed(module))


def _local_among(names: list[str]) -> list[types.ModuleType]:
    """Return the local modules among these names, and those that they use, directly or not."""
    seen: dict[str, types.ModuleType] = {}
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        if name not in seen and module is not None and is_local(module):
            seen[name] = module
            names += _modules_used_by(module)
    return list(seen.values())


def importers_of(names: Iterable[str]) -> list[str]:
    """Return the notebook's other local modules that refer to a local one among these: `plug`, which fills `reg`.

    At their import they may have registered something there, which a rank that imports `reg` alone would not have.
    """
    used = {module.__name__ for module in _local_among(list(names))}
    if not used:
        return []
    imported = dict.fromkeys(_modules_used_by(sys.modules["__main__"]))
    modules = [module for name in imported if name not in used and (module := sys.modules.get(name)) is not None]
    return [each.__name__ for each in modules if is_local(each) and used.intersection(_modules_used_by(each))]


@functools.lru_cache(maxsize=1)
def _installed_folders() -> tuple[str, ...]:
    # Cached, because finding them takes 0.4 ms and they do not change.
    installed = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()]
    scripts = {sysconfig.get_path("scripts"), sysconfig.get_path("data")}
    return tuple(folder + os.sep for folder in {*installed, str(PACKAGE_FOLDER)} - scripts)


def is_of_installation(file: str) -> bool:
    """Return True for a file of the interpreter, or of a package that is installed for it."""
    return file.startswith(_installed_folders())


def is_local(module: types.ModuleType) -> bool:
    """Return True for a module of source code that belongs neither to the interpreter nor to an installed package."""
    # Not getattr: some of torch's modules import others when asked for an attribute.
    path = getattr(module, "__dict__", {}).get("__file__")
    if not isinstance(path, str) or not path.endswith(".py") or module.__name__ == "__main__":
        return False
    return not (is_of_installation(path) or "/site-packages/" in path or "/dist-packages/" in path)


def _modules_used_by(module: types.ModuleType) -> Iterator[str]:
    for value in list(vars(module).values()):
        if isinstance(value, types.ModuleType):
            yield value.__name__
        elif isinstance(name := getattr(value, "__module__", None), str):
            yield name


def _has_changed(module: types.ModuleType) -> bool:
    # Another loader makes other code of the same source: pytest's rewrites its assertions.
    if type(getattr(module.__spec__, "loader", None)) is not importlib.machinery.SourceFileLoader:
        return False
    path = str(module.__file__)
    try:
        stat = os.stat(path)
        shapes, values = _written(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, SyntaxError, ValueError):
        return True
    # Other code has set the values if the file is older than this process, whose time may be a second early.
    if stat.st_mtime >= psutil.Process().create_time() and _has_other_values(module, values):
        return True
    return any(_shape(f.__code__) not in shapes for f in _functions(module) if f.__code__.co_filename == path)


@functools.lru_cache(maxsize=256)
def _written(path: str, mtime: int, size: int) -> tuple[frozenset[Any], Mapping[str, Any]]:  # noqa: ARG001 - the version
    """Return the shapes of a file's functions, and its plain values. 1,000 lines take 10 ms."""
    tree = ast.parse(Path(path).read_bytes(), path)
    present = compile(tree, path, "exec", dont_inherit=True)
    return frozenset(map(_shape, cells.codes_in(present))), _written_values(tree)


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yield the functions of a module, and the methods of its classes."""
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    for namespace in (module, *classes):
        for value in vars(namespace).values():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if isinstance(function, types.FunctionType):
                yield function


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    # Not the code object itself: IPython's %autoreload compiles a changed function alone, so that its line numbers and
    # its position in the file differ from those in the module.
    consts = tuple(_shape(c) if isinstance(c, types.CodeType) else (type(c), c) for c in code.co_consts)
    return code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_argcount, consts


def _has_other_values(module: types.ModuleType, written: Mapping[str, Any]) -> bool:
    """Return True if the file gives variables other values than the module has.

    A variable that a cell has assigned does not count, and neither does one that functions of the module assign
    themselves (`global`), or that its code assigns twice.
    """
    present, assigned = vars(module), replaced_attributes_of(os.getpid()).assigned_in(module.__name__)
    return any(
        name in present and name not in assigned and not _is_same(present[name], value)
        for name, value in written.items()
    )


def _is_same(present: Any, written: Any) -> bool:
    if isinstance(written, dict) and isinstance(present, dict):
        # An entry that was added or removed is the module's own affair more often than not: a cache, a registry.
        both = [key for key, value in written.items() if isinstance(value, PLAIN) and key in present]
        return all(_is_same(present[key], written[key]) for key in both)
    return type(present) is type(written) and bool(present == written)


def _written_values(tree: ast.Module) -> Mapping[str, Any]:
    """Return the plain values that a file assigns once to public variables at its top level."""
    values: dict[str, Any] = {}
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=expression)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression)
            ):
                with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    values[name] = ast.literal_eval(expression)
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
