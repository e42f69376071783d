"""The notebook's cells as source files: their lines, which travel with a call, and their names for readers."""

from __future__ import annotations

import ast
import contextlib
import linecache
import types
from typing import TYPE_CHECKING, TypeAlias

from notebook_launcher.ipython_shell import running_shell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAGIC = "get_ipython().run_cell_magic("
"""The beginning of a cell whose first line was a magic."""

Cells: TypeAlias = "dict[str, tuple[str, list[str]]]"
"""By file name: the cell's place, and its lines."""


def pack_cells(filenames: Iterable[str]) -> Cells:
    """Return the cells among these files."""
    in_memory = {name for name, entry in list(linecache.cache.items()) if len(entry) == 1 or entry[1] is None}
    lines_of = {name: linecache.getlines(name) for name in in_memory.intersection(filenames)}
    return {name: (shown_file(name), lines) for name, lines in lines_of.items() if lines}


def keep_lines(cells: Cells) -> None:
    """Keep lines of cells that were packed in another process, so that tracebacks in this one show them."""
    for filename, (place, lines) in cells.items():
        # Without a modification time, so that linecache.checkcache() does not look for the file.
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, place)


def places() -> dict[str, str]:
    """Return the place of each cell of this kernel, by its file name."""
    in_memory = [name for name, entry in list(linecache.cache.items()) if len(entry) == 4 and entry[1] is None]
    return {name: place for name in in_memory if (place := shown_file(name)) != name}


def keep_places(places_of_kernel: dict[str, str]) -> None:
    """Keep the places of another process's cells, for texts that this process writes; it has no lines of them."""
    keep_lines({filename: (place, []) for filename, place in places_of_kernel.items()})


def shown_file(filename: str) -> str:
    """Return `Cell In[3]` for the file name that IPython gives a cell's code, and other names as they are."""
    entry = linecache.cache.get(filename, ())
    if len(entry) == 4 and entry[1] is None and entry[3] != filename:
        return str(entry[3])  # The entry came with a call.
    shell = running_shell()
    try:
        label, name = shell.compile.format_code_name(filename)
    except Exception:  # no shell, an old one, or no cell
        return filename
    return f"{label} {name}"


def last_cell_that_set(name: str) -> str:
    """Return `Cell In[3]` for the last cell of the notebook whose own lines set a variable; empty if none is known."""
    history = getattr(running_shell(), "history_manager", None)
    for number, source in reversed(list(enumerate(getattr(history, "input_hist_parsed", ())))):
        if name in source and name in _names_set(source):
            return f"Cell In[{number}]"
    return ""


def _names_set(source: str) -> set[str]:
    """Return the variables that a cell's code sets outside of functions and classes."""
    names: set[str] = set()
    pending: list[ast.AST] = []
    with contextlib.suppress(SyntaxError, ValueError):
        pending.append(ast.parse(source))
    while pending:
        match node := pending.pop():
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp() | ast.Lambda():
                continue  # Names of their own.
        pending += ast.iter_child_nodes(node)
    return names


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code of all functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def source_line(filename: str, number: int) -> str:
    """Return a line of code, counted from 1, without the spaces around it; empty if it is not known here.

    Of a cell on ranks IPython keeps `get_ipython().run_cell_magic(name, line, body)`, the call that the cell became.
    """
    line, first = (linecache.getline(filename, at).strip() for at in (number, 1))
    if not first.startswith(MAGIC):
        return line
    match ast.parse(first):
        case ast.Module(body=[ast.Expr(value=ast.Call(args=[_, _, ast.Constant(value=str(body))]))]):
            lines = ["", "", *body.splitlines()]  # Line 1 is the magic, and there is no line 0.
            return lines[number].strip() if number < len(lines) else ""
    return line
