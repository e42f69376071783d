"""Code that ranks run before a call: `setup=` of a launch, and IPython's `%%everywhere`.

A `%%everywhere` cell runs in the kernel, and then in the ranks of all later launches, before the function; in an open
session, before its next call. The cells are kept by the magic, so they end with the kernel.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import types
import uuid
from typing import TYPE_CHECKING, Any

from notebook_launcher.ipython_shell import running_cell_file, running_shell
from notebook_launcher.notebook_code import names_in
from notebook_launcher.travel import cells, repeated_calls
from notebook_launcher.travel.function_call import CellRequest, RankFunction
from notebook_launcher.travel.kinds import kind_of_type
from notebook_launcher.travel.settings import SetupStep
from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from notebook_launcher.config import LaunchConfig

__all__ = ["EverywhereMagic", "kept_code", "register", "setup_steps", "unregister"]

NAME = "everywhere"
MAGIC = f"%%{NAME}"
CELLS = "notebook_launcher.processes.notebook.rank_cells"
WAYS = f"Write `{MAGIC}` on a line of its own above the code; `%{NAME} --list` and `%{NAME} --clear` manage the cells."


def setup_steps(config: LaunchConfig) -> tuple[SetupStep, ...]:
    """Return the code that ranks run before a call: the `%%everywhere` cells, in order, then `config.setup`.

    Before them, calls of other cells that leave nothing to be sent, such as `codecs.register(find)`.
    """
    magic = _installed(running_shell())
    kept = [] if magic is None else magic.kept
    made = {name for cell in kept for name in cell.made}
    steps = []
    for call in repeated_calls():
        request = CellRequest(code=call.text, filename=f"<{call.text}>", place="<cell>", pulls=True, is_python=True)
        key, what = f"{call.at} {call.text}", f"`{call.text}` of a cell"
        steps.append(
            SetupStep(key=key, what=what, run=_runner(request), variables=_present(call.names - made), shared={})
        )
    for cell in kept:
        variables = _present(cell.used - made)
        run = _runner(cell.request)
        steps.append(SetupStep(key=cell.key, what=cell.what, run=run, variables=variables, shared=cell.shared))
    if isinstance(config.setup, str):
        request = CellRequest(code=config.setup, filename="<setup>", place="<setup>", pulls=True, is_python=True)
        used = _present(names_in(config.setup) - made)
        steps.append(SetupStep(key="setup", what="setup=", run=_runner(request), variables=used))
    elif config.setup is not None:
        steps.append(SetupStep(key="setup", what="setup=", run=config.setup))
    return tuple(steps)


def kept_code() -> list[tuple[str, str, frozenset[str]]]:
    """Return the `%%everywhere` cells in order: each in words, with its code and the variables that it has set."""
    magic = _installed(running_shell())
    return [] if magic is None else [(cell.what, cell.request.code, cell.made) for cell in magic.kept]


def _runner(request: CellRequest) -> functools.partial[Any]:
    return functools.partial(RankFunction(CELLS, "run_cell"), request)


def _present(names: Iterable[str]) -> dict[str, Any]:
    """Return those of these variables that the notebook has, with their present values."""
    notebook = vars(sys.modules["__main__"])
    return {name: notebook[name] for name in names if name in notebook}


def register(shell: Any) -> None:
    """Register the magic with a shell, unless it is registered."""
    if _installed(shell) is None:
        magic = EverywhereMagic(shell)
        shell.register_magic_function(magic.run_cell, "cell", NAME)
        shell.register_magic_function(magic.manage, "line", NAME)


def unregister(shell: Any) -> None:
    """Remove the magic, with its cells."""
    if _installed(shell) is not None:
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(NAME, None)


def _installed(shell: Any) -> EverywhereMagic | None:
    if shell is None:
        return None
    magic = getattr(shell.magics_manager.magics["cell"].get(NAME), "__self__", None)
    return magic if isinstance(magic, EverywhereMagic) else None


@dataclasses.dataclass(frozen=True, slots=True)
class _KeptCell:
    identity: str
    """The front end's id of the cell; its text where there is none."""
    key: str
    request: CellRequest
    made: frozenset[str]
    """The variables that the cell has set."""
    used: frozenset[str]
    """The global variables that its code uses."""
    shared: Mapping[str, Any]
    """As in `SetupStep`."""

    @property
    def what(self) -> str:
        """The cell in words."""
        return f"the {MAGIC} cell {self.request.place.removeprefix('Cell ')}"


class EverywhereMagic:
    """`%%everywhere` and `%everywhere`, with the cells that ranks run."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.kept: list[_KeptCell] = []
        """The cells that ranks run, in order."""

    def run_cell(self, line: str, cell: str) -> Any:
        """Run the cell here, and in the ranks of all later launches and sessions, before the function.

        For what ranks must have before a function arrives: `AutoModel.register(...)`, custom operators, plugins. Open
        sessions run the cell before their next call. Cells run in the order in which they were first run. A cell that
        is run again, edited or not, takes its own place; a front end that gives cells no id, such as a terminal, knows
        it by its unchanged text alone. A cell that fails here is not kept. The ranks have no process group yet. The
        classes and functions that the cell defines are each process's own. Other variables arrive with the notebook's
        present values, also those of other cells that this one uses.

            %everywhere --list     the cells that ranks run
            %everywhere --clear    forget them all; what open sessions have run stays
        """
        if line.strip():
            raise _usage_error(f"{MAGIC} {line.strip()}: it has no options. {WAYS}")
        __tracebackhide__ = True  # IPython's word for frames that an error of the cell is shown without.
        present, key = self._shell.user_ns, uuid.uuid4().hex
        before = dict(present)
        filename = running_cell_file(self._shell) or f"<cell {key} everywhere>"
        value = self._run_here(cell, filename)
        python, is_python = self._as_python(cell)
        place = cells.shown_file(filename)
        made = {name: new for name, new in present.items() if name not in before or before[name] is not new}
        # The front end gives the running cell an id, or none.
        parent: Mapping[str, Any] = getattr(self._shell, "get_parent", dict)()
        new = _KeptCell(
            identity=str((parent.get("metadata") or {}).get("cellId") or "") or cell,
            key=key,
            request=CellRequest(
                code=cell, filename=filename, place=place, first_line=MAGIC, pulls=True, is_python=is_python
            ),
            made=frozenset(made),
            used=frozenset(names_in(python)),
            shared={name: value for name, value in made.items() if _is_each_process_own(value)},
        )
        places = [at for at, kept in enumerate(self.kept) if kept.identity == new.identity]
        if places:
            self.kept[places[0]] = new
        else:
            self.kept.append(new)
        return value

    def manage(self, line: str) -> None:
        """Show the cells that ranks run before each function, or forget them: `%everywhere --clear`."""
        match line.split():
            case [] | ["--list"]:
                text = "\n".join(map(_headline, self.kept)) or f"no cell runs everywhere. {WAYS}"
            case ["--clear"]:
                text = f"{plural(len(self.kept), 'cell')} forgotten; what open sessions have run stays"
                self.kept.clear()
            case _:
                raise _usage_error(f"%{NAME} {line.strip()}: {WAYS}")
        print(text)  # noqa: T201 - the answer of a magic

    def _run_here(self, cell: str, filename: str) -> Any:
        """Run a cell in the notebook's namespace; return its last expression's value."""
        __tracebackhide__ = True
        compiler, namespace = self._shell.compile, self._shell.user_ns
        # The file name is the whole cell's, of which IPython keeps the call of the magic: now the lines as typed.
        cells.keep_lines({filename: (filename, [f"{line}\n" for line in (MAGIC, *cell.split("\n"))])})
        source, _ = self._as_python(cell)
        tree = self._shell.transform_ast(compiler.ast_parse(f"\n{source}", filename))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compiler(tree, filename, "exec"), namespace)  # noqa: S102 - running the user's code is the purpose
        if last is None:
            return None
        return eval(compiler(ast.Expression(last.value), filename, "eval"), namespace)  # noqa: S307 - as above

    def _as_python(self, cell: str) -> tuple[str, bool]:
        """Return a cell without the syntax of IPython, on the same lines; True if it has none."""
        try:
            ast.parse(cell)
        except SyntaxError:
            num_empty = len(cell) - len(cell.lstrip("\n"))  # IPython drops empty lines at the beginning.
            return "\n" * num_empty + self._shell.transform_cell(cell), False
        return cell, True


def _is_each_process_own(value: Any) -> bool:
    """Return True for definitions, and for objects that cannot travel, such as locks."""
    if isinstance(value, types.FunctionType | type):
        return value.__module__ == "__main__"
    return kind_of_type(type(value)) is not None


def _headline(kept: _KeptCell) -> str:
    lines = [line for line in kept.request.code.splitlines() if line.strip()]
    more = f"  (and {plural(len(lines) - 1, 'more line')})" if len(lines) > 1 else ""
    return f"{kept.request.place}: {lines[0] if lines else ''}{more}"


def _usage_error(text: str) -> Exception:
    from IPython.core.error import UsageError

    error: Exception = UsageError(text)
    return error
