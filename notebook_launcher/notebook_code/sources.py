"""Source of a definition in the notebook or in a program, and the global names that the source uses."""

from __future__ import annotations

import ast
import inspect
import linecache
import symtable
import textwrap
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["attribute_chains", "names_at_definition", "names_in", "source_of"]


def source_of(definition: Any) -> str:
    """Return the source of a function or class, with its decorators.

    Raises:
        ConfigError: The source cannot be found, or is not a definition at the top level of a cell or file.
    """
    name = definition.__name__
    try:
        source = textwrap.dedent(inspect.getsource(definition))
    except (OSError, TypeError):
        source = _class_in_cells(name) if isinstance(definition, type) else ""
    if not source:
        raise ConfigError(
            f"{name} cannot be exported: its source was not found. Define it in a cell or in a module, not by exec()."
        )
    if "<locals>" in definition.__qualname__ or name == "<lambda>":
        raise ConfigError(
            f"{definition.__qualname__} cannot be exported: only what is defined at the top level of a cell has a "
            "source of its own. Write it as a function or class with `def` or `class` there."
        )
    body = ast.parse(source).body
    if len(body) != 1 or getattr(body[0], "name", "") != name:
        raise ConfigError(
            f"{name} cannot be exported: its source does not begin with its definition: {source.splitlines()[0]!r}."
        )
    return source.rstrip() + "\n"


def names_in(source: str) -> set[str]:
    """Return the global names that a definition uses, when it is defined or when it runs."""
    table = symtable.symtable(source, "<exported>", "exec")
    return {name for scope in _scopes(table) for name in _global_names(scope)} - {"__file__", "__name__"}


def names_at_definition(source: str) -> set[str]:
    """Return the global names that a definition needs at once: decorators, defaults, bases, annotations."""
    tables = [symtable.symtable(source, "<exported>", "exec")]
    names = set(_global_names(tables[0]))
    # The body of a class is executed with the class; the body of a function is not.
    for child in tables[0].get_children():
        if child.get_type() == "class":
            names |= set(_global_names(child))
    return names


def attribute_chains(source: str) -> set[str]:
    """Return chains of attributes such as `xml.etree.ElementTree`."""
    return {chain for node in ast.walk(ast.parse(source)) if (chain := _chain(node))}


def _chain(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) and parts else ""


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)


def _global_names(scope: symtable.SymbolTable) -> Iterator[str]:
    is_module = scope.get_type() == "module"
    for symbol in scope.get_symbols():
        if symbol.is_referenced() and (not symbol.is_assigned() if is_module else symbol.is_global()):
            yield symbol.get_name()
        elif not is_module and symbol.is_declared_global():
            yield symbol.get_name()  # It is only assigned, as a counter may be.


def _class_in_cells(name: str) -> str:
    """Return the newest source of a class among the notebook's cells, which Python cannot find by itself."""
    for filename in reversed(list(linecache.cache)):
        source = "".join(linecache.getlines(filename))
        if f"class {name}" not in source:
            continue
        try:
            body = ast.parse(source).body
        except SyntaxError:
            continue
        for node in reversed(body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(f"{line}\n" for line in source.splitlines()[first - 1 : node.end_lineno])
    return ""
