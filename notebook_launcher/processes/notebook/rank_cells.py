"""Cells on a rank: code that runs in the rank's `__main__`, as a notebook runs its cells.

Magics, `!commands` and rich values need IPython's shell, which a rank has if IPython is installed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import inspect
import io
import os
import sys
import token
import tokenize
from typing import TYPE_CHECKING, Any

from notebook_launcher.processes.notebook.cell_sources import CellSources
from notebook_launcher.processes.notebook.contents import fingerprint_of, is_abridged
from notebook_launcher.travel.rank_function import CellOutput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, TracebackType

    from notebook_launcher.travel.rank_function import CellRequest

__all__ = ["run_cell", "shell_of_rank"]

# The state belongs to the rank's `__main__`, as do the variables of its cells.
STATE_NAME = "__notebook_launcher_cells__"
MAX_BYTES = 64_000_000
"""Size of tensors up to which the value of a cell is compared among the ranks: 60 ms of reading."""
COMMENTS = (token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER, tokenize.NL, tokenize.COMMENT)


def run_cell(request: CellRequest) -> Any:
    """Run a cell on this rank; return the value of its last expression, or that value as it is shown."""
    namespace = sys.modules["__main__"].__dict__
    state: _Cells = namespace.setdefault(STATE_NAME, _Cells())
    namespace.update(request.pushed)
    with _magics(None if request.is_python else shell_of_rank()):
        value = state.run(request, namespace)
        if value is not None and not request.is_python:
            namespace["_"] = value
        if request.pulls:
            return value
        return None if value is None or _is_silent(request.code) else _shown(value)


def shell_of_rank() -> Any:
    """Return IPython's shell, which works in the rank's `__main__`; None if IPython is not installed."""
    with contextlib.suppress(ImportError):
        from IPython.core.interactiveshell import InteractiveShell

        if InteractiveShell.initialized():
            shell: Any = InteractiveShell.instance()
            main = sys.modules["__main__"]
            if shell.user_ns is not main.__dict__:
                shell.user_module, shell.user_ns = main, main.__dict__
                shell.user_ns.setdefault("_dh", [os.getcwd()])  # where `%cd` keeps the folders
                shell.set_hook("show_in_pager", _print_page, 0)
            return shell
    return None


class _Cells:
    """State of a rank's cells: their source lines, and the event loop of their `await`."""

    def __init__(self) -> None:
        self._sources = CellSources()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of all cells, so that a task may outlive its cell; None until a cell awaits."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Cells, ()  # Empty: a function that captures the whole namespace takes this object along.

    def run(self, request: CellRequest, namespace: dict[str, Any]) -> Any:
        """Run the code and return the value of its last expression; None if it ends with a statement."""
        first = [f"{request.first_line}\n"] if request.first_line else []
        lines = [*first, *_lines(request.code)]
        self._sources.add(request.filename, request.place, lines)
        try:
            code = request.code if request.is_python else _transformed(request.code)
            tree = ast.parse("\n" * len(first) + code, request.filename)
            last = ast.Expression(tree.body.pop().value) if _ends_with_expression(tree) else None  # type: ignore[attr-defined]
            codes = [self._compiled(part, request) for part in (tree, last) if part is not None]
        except SyntaxError as error:
            if error.filename == request.filename:
                _move(error, request.place, lines)
            raise error.with_traceback(None)  # noqa: B904 - the same exception, without the frames of the compiler
        value = self._evaluate(codes, namespace)
        return value if last is not None else None

    def _compiled(self, tree: ast.Module | ast.Expression, request: CellRequest) -> CodeType:
        mode = "exec" if isinstance(tree, ast.Module) else "eval"
        code: CodeType = compile(tree, request.filename, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        self._sources.follow(request.filename, code)
        return code

    def _evaluate(self, codes: list[CodeType], namespace: dict[str, Any]) -> Any:
        """Run the parts of a cell and return the value of the last one.

        If one part awaits, all run inside the event loop, so that `asyncio.create_task` finds it before an `await`.
        """
        if any(map(_awaits, codes)):
            return self._finished(codes, namespace)
        *_, value = [eval(code, namespace) for code in codes]  # noqa: S307 - running the user's code is the purpose
        return value

    def _finished(self, codes: list[CodeType], namespace: dict[str, Any]) -> Any:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        cell = _CellInLoop(codes, namespace)
        task = self._loop.create_task(cell.run())
        try:
            return self._loop.run_until_complete(task)
        except BaseException as error:  # raised again, without asyncio's frames
            if not task.done():  # An interrupt has ended the wait.
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task]))
            tb = _from_file(error.__traceback__, codes[0].co_filename)
            # Not an assignment, because the exception may be frozen.
            raise BaseException.with_traceback(error, tb)  # noqa: B904 - the same exception
        finally:
            cell.keep_context()


class _CellInLoop:
    """A cell that awaits: a task of the event loop, with the context variables that it sets."""

    def __init__(self, codes: list[CodeType], namespace: dict[str, Any]) -> None:
        self._codes = codes
        self._namespace = namespace
        self._context: contextvars.Context | None = None
        """The task's context variables as the cell left them; None until it ends."""

    async def run(self) -> Any:
        """Run the parts in turn and return the value of the last one."""
        value = None
        try:
            for code in self._codes:
                value = eval(code, self._namespace)  # noqa: S307 - running the user's code is the purpose
                if _awaits(code):
                    value = await value
        finally:
            self._context = contextvars.copy_context()
        return value

    def keep_context(self) -> None:
        """Set the task's context variables here too: NumPy keeps its print options in one, for later cells."""
        for variable, value in (self._context or {}).items():
            variable.set(value)


def _awaits(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _from_file(tb: TracebackType | None, filename: str) -> TracebackType | None:
    """Return a traceback without the frames before the first frame of a file; all frames if none is of this file."""
    found = tb
    while found is not None and found.tb_frame.f_code.co_filename != filename:
        found = found.tb_next
    return found or tb


def _move(error: SyntaxError, place: str, lines: list[str]) -> None:
    """Write into a syntax error the place of its cell, and the line, which the compiler of a tree does not know."""
    at = error.lineno or 0
    error.filename, error.text = place, error.text or "".join(lines[at - 1 : at])
    # An exception travels by its arguments.
    error.args = (error.msg, (place, error.lineno, error.offset, error.text, error.end_lineno, error.end_offset))


def _lines(code: str) -> list[str]:
    return [f"{line}\n" for line in code.split("\n")]


def _transformed(code: str) -> str:
    """Return code with IPython's syntax (magics, `!commands`, `obj?`) as plain Python, with the same line numbers."""
    shell = shell_of_rank()
    if shell is None:
        return code
    # IPython drops empty lines at the beginning.
    num_empty = len(code) - len(code.lstrip("\n"))
    return "\n" * num_empty + str(shell.transform_cell(code.lstrip("\n")))


def _ends_with_expression(tree: ast.Module) -> bool:
    return bool(tree.body) and isinstance(tree.body[-1], ast.Expr)


def _is_silent(code: str) -> bool:
    """Return True if the code ends with a semicolon, which keeps a notebook from showing the value."""
    if ";" not in code:
        return False
    try:
        tokens = [token for token in tokenize.generate_tokens(io.StringIO(code).readline) if token.type not in COMMENTS]
    except (tokenize.TokenError, SyntaxError):  # IPython's own syntax.
        return code.rstrip().endswith(";")
    return bool(tokens) and tokens[-1].string == ";"


def _shown(value: Any) -> CellOutput:
    shell = shell_of_rank()
    if shell is None:
        return CellOutput(data={"text/plain": repr(value)})
    data, metadata = shell.display_formatter.format(value)
    presentable = getattr(shell.display_pub, "presentable", dict)  # `%%capture` on the rank has another publisher.
    fingerprint = None
    with contextlib.suppress(Exception):  # The code of foreign objects may do anything.
        fingerprint = fingerprint_of(value, MAX_BYTES) if is_abridged(value) else None
    return CellOutput(data=presentable(data), metadata=metadata, fingerprint=fingerprint)


@contextlib.contextmanager
def _magics(shell: Any) -> Iterator[None]:
    """Have `get_ipython` among the builtins, which magics and `!commands` are compiled to."""
    if shell is None:
        yield
        return
    with shell.builtin_trap:
        yield


def _print_page(_shell: Any, page: Any, **_options: Any) -> None:
    """Print what IPython shows in its pager, such as the answer to `obj?`."""
    text = page.get("text/plain", "") if isinstance(page, dict) else page
    sys.stdout.write(f"{text}\n")  # At once, so that equal pages of all ranks are shown once.
