"""Source of a definition in the notebook or in a program, and the global names that the source uses.

The run's thread reads sources while the cell goes on. So no syntax tree of Python objects is made here: before Python
3.11.8 and 3.12.2, two threads that make trees at the same time can get "SystemError: AST constructor recursion depth
mismatch" (https://github.com/python/cpython/issues/106905), and IPython makes one for each cell.
"""

from __future__ import annotations

import inspect
import io
import linecache
import re
import symtable
import sys
import textwrap
import token
import tokenize
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["attribute_chains", "names_at_definition", "names_in", "source_of", "statements_about"]

FILLERS = ("add", "append", "extend", "insert", "register", "setdefault", "update")
"""Methods by which a cell fills a registry."""
CHAIN = re.compile(r"(?<![\w.])(?<!\. )[^\W\d]\w*(?: ?\. ?[^\W\d]\w*)+")


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
            "source of its own. Write it as a function or class with `def` or `class` there. Its source begins: "
            f"{source.splitlines()[0][:80]!r}."
        )
    if _names_assigned(source) != {name}:
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


def statements_about(name: str) -> tuple[str, list[str]]:
    """Return the newest assignment to a variable at the top level of the notebook, and what fills it afterwards.

    These are statements such as `REG["a"] = f` and `REG.append(f)`. The assignment is empty if there is none.
    """
    first, fills = "", list[str]()
    for lines in _notebook():
        try:
            statements = list(_statements("".join(lines)))
        except (SyntaxError, tokenize.TokenError):
            continue
        for words in statements:
            texts = [word.string for word in words]
            if texts[0] != name:
                continue
            source = "".join(lines[words[0].start[0] - 1 : words[-1].end[0]]).rstrip() + "\n"
            match texts[1:3]:
                case ["=", *_] | [":", *_] if "=" in texts:
                    first, fills = source, []
                case ["[", *_] if "=" in texts:
                    fills.append(source)
                case ["|=" | "+=", *_]:
                    fills.append(source)
                case [".", method] if method in FILLERS:
                    fills.append(source)
    return first, fills


def _notebook() -> Iterator[list[str]]:
    """Yield the lines of each cell in the order in which they first ran, or those of the program."""
    in_memory = [name for name, entry in list(linecache.cache.items()) if len(entry) == 4 and entry[1] is None]
    program = getattr(sys.modules["__main__"], "__file__", None)
    for filename in [program] if program else in_memory:
        lines = linecache.getlines(filename)
        if lines and not lines[0].startswith("%%"):
            yield lines


def attribute_chains(source: str) -> set[str]:
    """Return chains of attributes such as `xml.etree.ElementTree`."""
    code = " ".join(each.string for each in _tokens(source) if _is_code(each))
    return {chain.replace(" ", "") for chain in CHAIN.findall(code)}


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def _is_code(each: tokenize.TokenInfo) -> bool:
    """Return False for comments and strings, but True for an f-string, which contains code."""
    is_text = each.type == token.STRING and "f" not in each.string[: each.string.index(each.string[-1])].lower()
    return each.type not in {token.COMMENT, token.NL} and not is_text


def _names_assigned(source: str) -> set[str]:
    """Return the names to which a source assigns, or which it defines, at its top level."""
    table = symtable.symtable(source, "<exported>", "exec")
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}


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
        lines = linecache.getlines(filename)
        if any(f"class {name}" in line for line in lines) and (first := _first_line(lines, name)) is not None:
            return "".join(inspect.getblock(lines[first:]))
    return ""


def _first_line(lines: list[str], name: str) -> int | None:
    """Return the index of the first line of the last definition of a class, with its decorators, at the top level."""
    try:
        statements = list(_statements("".join(lines)))
    except (SyntaxError, tokenize.TokenError):
        return None
    found, decorator = None, None
    for words in statements:
        first = words[0].start[0] - 1 if decorator is None else decorator
        decorator = first if words[0].string == "@" else None
        if [word.string for word in words[:2]] == ["class", name]:
            found = first
    return found


def _statements(source: str) -> Iterator[list[tokenize.TokenInfo]]:
    """Yield the tokens of each logical line at the top level."""
    words: list[tokenize.TokenInfo] = []
    depth = 0
    for each in _tokens(source):
        if each.type in {token.INDENT, token.DEDENT}:
            depth += 1 if each.type == token.INDENT else -1
        elif each.type == token.NEWLINE:
            if words and depth == 0:
                yield words
            words = []
        elif each.type not in {token.COMMENT, token.NL}:
            words.append(each)
