"""Cells on a rank: code that runs in the rank's `__main__`, as a notebook runs its cells.

Magics, `!commands` and rich values need IPython's shell, which a rank has if IPython is installed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import hashlib
import inspect
import io
import linecache
import os
import reprlib
import sys
import token
import tokenize
import types
import weakref
from typing import TYPE_CHECKING, Any

from notebook_launcher.travel import cells
from notebook_launcher.travel.function_call import CellOutput, Completion, Variable
from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import CodeType, TracebackType

    from notebook_launcher.travel.function_call import CellRequest


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
    shell = None if request.is_python else shell_of_rank()
    # It has `get_ipython` among the builtins, which magics and `!commands` are compiled to.
    with contextlib.nullcontext() if shell is None else shell.builtin_trap:
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
        lines = [*first, *(f"{line}\n" for line in request.code.split("\n"))]
        self._sources.add(request.filename, request.place, lines)
        try:
            code = request.code if request.is_python else _transformed(request.code)
            tree = ast.parse("\n" * len(first) + code, request.filename)
            is_expression = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
            last = ast.Expression(tree.body.pop().value) if is_expression else None  # type: ignore[attr-defined]
            codes = [self._compiled(part, request) for part in (tree, last) if part is not None]
        except SyntaxError as error:
            if error.filename == request.filename:
                _move(error, request.place, lines)
            raise error.with_traceback(None)  # noqa: B904 - the same exception, without the frames of the compiler
        # If one part awaits, all run inside the event loop, so that `asyncio.create_task` finds it before an `await`.
        if any(map(_awaits, codes)):
            value = self._finished(codes, namespace)
        else:
            *_, value = [eval(part, namespace) for part in codes]  # noqa: S307 - running the user's code is the purpose
        return value if last is not None else None

    def _compiled(self, tree: ast.Module | ast.Expression, request: CellRequest) -> CodeType:
        mode = "exec" if isinstance(tree, ast.Module) else "eval"
        code: CodeType = compile(tree, request.filename, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        self._sources.follow(request.filename, code)
        return code

    def _finished(self, codes: list[CodeType], namespace: dict[str, Any]) -> Any:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        contexts: list[contextvars.Context] = []

        async def run() -> Any:
            value = None
            try:
                for code in codes:
                    value = eval(code, namespace)  # noqa: S307 - running the user's code is the purpose
                    if _awaits(code):
                        value = await value
            finally:
                contexts.append(contextvars.copy_context())
            return value

        task = self._loop.create_task(run())
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
            # The variables that the cell has set hold here, too: NumPy keeps its print options in one, for later cells.
            for context in contexts:
                for variable, value in context.items():
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


def _transformed(code: str) -> str:
    """Return code with IPython's syntax (magics, `!commands`, `obj?`) as plain Python, with the same line numbers."""
    shell = shell_of_rank()
    if shell is None:
        return code
    # IPython drops empty lines at the beginning.
    num_empty = len(code) - len(code.lstrip("\n"))
    return "\n" * num_empty + str(shell.transform_cell(code.lstrip("\n")))


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


def _print_page(_shell: Any, page: Any, **_options: Any) -> None:
    """Print what IPython shows in its pager, such as the answer to `obj?`."""
    text = page.get("text/plain", "") if isinstance(page, dict) else page
    sys.stdout.write(f"{text}\n")  # At once, so that equal pages of all ranks are shown once.


# --------------------------------------------------------------------------------------------------------------------
# The variables of a rank's `__main__`, as the notebook sets, reads, lists and completes them.


MAX_TEXT = 60


def push(values: Mapping[str, Any]) -> None:
    """Set variables on this rank."""
    _namespace().update(values)


def pull(expressions: tuple[str, ...]) -> Any:
    """Return the value of an expression on this rank; a tuple for several."""
    namespace = _namespace()
    values = tuple(eval(expression.strip(), namespace) for expression in expressions)  # noqa: S307 - of the user
    return values[0] if len(values) == 1 else values


def has(name: str) -> bool:
    """Return True if this rank has a variable of that name."""
    return name in _namespace()


def remove(name: str) -> None:
    """Remove a variable from this rank; raises `NameError` if there is none."""
    try:
        del _namespace()[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined") from None


def variables() -> dict[str, Variable]:
    """Return this rank's variables; modules and names with a leading underscore are left out."""
    return {
        name: _described(value)
        for name, value in _namespace().items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def complete(code: str, offset: int) -> list[Completion]:
    """Return what IPython's completer offers at a place in a cell on this rank."""
    from IPython.core.completer import IPCompleter, provisionalcompleter

    shell = shell_of_rank()
    completer: Any = IPCompleter(shell=shell, namespace=_namespace(), global_namespace=_namespace())
    completer.use_jedi = False  # Jedi reads the disk for every cell.
    with provisionalcompleter():
        found = list(completer.completions(code, offset))
    return [Completion(text=each.text, start=each.start, end=each.end, kind=each.type) for each in found]


def inspect_name(name: str, detail_level: int) -> Mapping[str, Any]:
    """Return what `name?` shows, as a bundle by MIME type; empty if there is no such name."""
    with contextlib.suppress(KeyError):
        data: Mapping[str, Any] = shell_of_rank().object_inspect_mime(name, detail_level)
        return data
    return {}


def _namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _described(value: Any) -> Variable:
    text, fingerprint = "", None
    with contextlib.suppress(Exception):  # The code of foreign objects may do anything.
        text = _short(value)
    with contextlib.suppress(Exception):
        fingerprint = fingerprint_of(value)
    kind = type(value)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__.partition('.')[0]}."
    return Variable(type_name=home + kind.__qualname__, value=text, fingerprint=fingerprint)


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        device = str(getattr(value, "device", ""))
        return " ".join(filter(None, (str(tuple(shape)), dtype, "" if device == "cpu" else device)))
    if hasattr(value, "parameters") and hasattr(value, "state_dict"):
        return plural(sum(parameter.numel() for parameter in value.parameters()), "parameter")
    if isinstance(value, PLAIN):
        text = " ".join(reprlib.repr(value).split())
        return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    return ""


# --------------------------------------------------------------------------------------------------------------------
# The source lines of the cells that ran on this rank, for as long as code of theirs lives.


class CellSources:
    """Keeps lines in `linecache` for tracebacks, `inspect.getsource` and `torch.compile`, and drops them afterwards."""

    def __init__(self) -> None:
        self._codes: dict[str, list[weakref.ref[types.CodeType]]] = {}
        """By file name: the code that was compiled from the cell."""

    def add(self, filename: str, place: str, lines: list[str]) -> None:
        """Install the lines of a cell that is about to run, and drop the lines of cells of which nothing is left."""
        for name in [name for name, codes in self._codes.items() if all(code() is None for code in codes)]:
            del self._codes[name]
            linecache.cache.pop(name, None)
        cells.keep_lines({filename: (place, lines)})
        self._codes[filename] = []

    def follow(self, filename: str, code: types.CodeType) -> None:
        """Keep the lines of a cell while this code lives, or a function that was compiled with it."""
        self._codes[filename] += map(weakref.ref, cells.codes_in(code))


# --------------------------------------------------------------------------------------------------------------------
# Fingerprints of values, by which the notebook knows if a variable, or a cell's value, is the same on all ranks.


PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, list, dict, set, frozenset, range)
"""Types whose contents are compared by their `repr`."""
MAX_COMPARED = 1_000_000_000
"""Bytes of tensors above which a variable is not compared: a second of reading."""


def fingerprint_of(value: Any, max_bytes: int = MAX_COMPARED) -> str | None:
    """Return a word that is equal for equal contents; None if the contents cannot be compared.

    Args:
        value: Any object.
        max_bytes: Size of tensors and arrays above which they are not compared.
    """
    if (tensors := _tensors(value)) is not None:
        from notebook_launcher.training.fingerprints import fingerprint, is_comparable

        tensors = list(tensors)
        if not all(map(is_comparable, tensors)) or sum(tensor.nbytes for tensor in tensors) > max_bytes:
            return None
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        return f"{fingerprint(tensors)} {shapes}"
    if type(value).__module__ == "numpy" and getattr(value, "nbytes", max_bytes) < max_bytes:
        return f"{_digest(value.tobytes())} {getattr(value, 'shape', '')} {value.dtype}"
    if isinstance(value, types.FunctionType):
        return _fingerprint_of_function(value)
    return _digest(repr(value).encode()) if _is_plain(value) else None


def is_abridged(value: Any) -> bool:
    """Return True for values whose text need not show all of their contents: tensors, models and arrays."""
    return _tensors(value) is not None or type(value).__module__ == "numpy"


def _fingerprint_of_function(function: types.FunctionType) -> str | None:
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [fingerprint_of(value) for value in (function.__defaults__, function.__kwdefaults__, *held)]
    if None in parts:
        return None
    return _digest(f"{_text_of_code(function.__code__)} {parts}".encode())


def _text_of_code(code: types.CodeType) -> str:
    """Return a text that is equal for equal code; the `repr` of a function inside it has an address."""
    constants = [_text_of_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code!r} {code.co_names} {code.co_freevars} {constants}"


def _tensors(value: Any) -> Iterable[Any] | None:
    if (torch := sys.modules.get("torch")) is None:
        return None
    if isinstance(value, torch.Tensor):
        return [value]
    return value.state_dict().values() if isinstance(value, torch.nn.Module) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    return type(value) in PLAIN


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
