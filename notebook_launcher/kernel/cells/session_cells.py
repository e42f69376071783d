"""Cells on the ranks of a session: code, values and names of the ranks' `__main__`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import keyword
import re
import secrets
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from notebook_launcher.drawing.reported import rank_tabs
from notebook_launcher.drawing.tables import Column, table_html, table_text
from notebook_launcher.errors import CallOrderError, CaptureError, ConfigError, check_rank
from notebook_launcher.ipython_shell import running_shell
from notebook_launcher.kernel.calls.call_scope import CallScope
from notebook_launcher.kernel.calls.checks import check_not_in_rank
from notebook_launcher.kernel.comms.rank_comms import RankPanels, shown_rank
from notebook_launcher.kernel.display.sink import make_sink
from notebook_launcher.kernel.failures import failure_display
from notebook_launcher.travel import cells
from notebook_launcher.travel.function_call import CellRequest, RankFunction
from notebook_launcher.wording import bounded, format_seconds, one_line, plural, rank_list, type_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from notebook_launcher.config import LaunchConfig
    from notebook_launcher.detached.attached_session import AttachedCall
    from notebook_launcher.kernel.display.sink import Sink
    from notebook_launcher.kernel.results import Results
    from notebook_launcher.kernel.run.handle import Run
    from notebook_launcher.travel.function_call import CellOutput, Completion, Variable


RankChoice: TypeAlias = "int | str | Iterable[int] | None"
"""Ranks as people name them: 2, [0, 2], "0,2", "1-3"; None or "all": all ranks."""

CELLS = "notebook_launcher.processes.notebook.rank_cells"
PUSHED = re.compile(r"\bargs\[0\](?:\[\d+\])?\['(\w+)'\]")
"""Path of a pushed variable in the arguments of the call that pushes it."""
MAX_CODE = 80
ANSWER_WITHIN = 1.0
"""Longest wait in seconds for rank 0 to complete a name."""


class SessionCells(ABC):
    """The part of a `Session` that runs cells on its ranks and reaches their variables."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        """Numbers for the file names of cells that did not come from a notebook's cell."""
        self._completions: list[Completion] = []
        """The last answer of rank 0, for when it is busy."""

    @property
    @abstractmethod
    def num_processes(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def config(self) -> LaunchConfig:
        """The options of all runs."""

    @property
    @abstractmethod
    def _is_at_rest(self) -> bool:
        """True if the ranks are up and idle, and their last run did not fail."""

    @abstractmethod
    def _start(self, fn: Any, args: Any, kwargs: Any, *, in_cell: bool, scope: CallScope) -> Run | AttachedCall: ...

    def execute(
        self,
        code: str,
        ranks: RankChoice = None,
        *,
        push: Mapping[str, Any] | None = None,
    ) -> Results:
        """Run code in the ranks' `__main__`, as a notebook runs a cell, and return the last expression's values.

        The code sees the variables of earlier cells on the ranks and what functions of `run` left there, and not
        the notebook's variables. IPython's magics, `!commands` and top-level `await` work. Output appears in the cell.

        Args:
            code: The code, of any number of lines.
            ranks: The ranks that run it: 2, [0, 2], "0,2", "1-3"; None: all ranks.
            push: Values of the notebook, by the names that they get on the ranks before the code runs.

        Returns:
            The value of the last expression by rank; None if the code ends with another statement.

        Raises:
            ConfigError: There is no such rank, or a name that cannot be a variable.
            Exception: Error that the code raised, as `run` raises it.
        """
        return self.execute_cell(code, ranks, push=push, pulls=True)

    def activate(self) -> None:
        """Have `%%ranks` cells run on this session's ranks; registers the magic.

        Raises:
            CallOrderError: There is no IPython here.
        """
        shell = running_shell()
        if shell is None:
            raise CallOrderError(
                "activate() needs IPython, because %%ranks is its magic. In a script use session.execute(code)."
            )
        from notebook_launcher import Session
        from notebook_launcher.kernel.cells import magics

        magics.register(shell, Session).active = self

    def execute_cell(
        self,
        code: str,
        ranks: RankChoice = None,
        *,
        push: Mapping[str, Any] | None = None,
        pulls: bool = False,
        is_quiet: bool = False,
        display: int | str | None = None,
        shows_time: bool = False,
        first_line: str = "",
        filename: str = "",
    ) -> Results:
        """Run code as `%%ranks` does, which calls this method: `execute` with the values shown.

        With `pulls` the values are returned alone. `display`: the rank whose tables and figures are shown, or "all";
        None: the first. `first_line`: the line of the cell above the code. Tracebacks know the code by `filename`.
        """
        if not isinstance(code, str):
            raise ConfigError(
                f"code={code!r} is {type_of(code)}. Pass the code as text, or a function to session.run(fn)."
            )
        members = selected_ranks(ranks, self.num_processes)
        running = range(self.num_processes) if members is None else members
        shown = shown_rank(display, running, self.config)
        panels = RankPanels(shown)
        name = filename or f"<cell {next(self._numbers)} on ranks>"
        request = CellRequest(
            code=code,
            filename=name,
            place=cells.shown_file(name),
            first_line=first_line,
            pushed=_checked_names(push or {}),
            pulls=pulls,
        )
        try:
            results = self._call_in_ranks("run_cell", request, ranks=members, code=code, panels=panels)
        except NameError as error:
            if hint := _push_hint(error):
                failure_display.add_hint(error, hint)
            raise
        outputs: Mapping[int, CellOutput] = {}
        if not (pulls or is_quiet):
            outputs = {rank: output for rank, output in results.returned.items() if output is not None}
        sink = make_sink()
        if shown == "all":
            outputs = show_tabs(sink, panels, outputs, running)
        show_values(sink, outputs, num_ranks=len(running), rich_rank=shown)
        if shows_time:
            sink.print("  ".join(f"[{row.rank}] {format_seconds(row.seconds)}" for row in results.ranks) + "\n")
        return results

    def push(self, values: Mapping[str, Any] | None = None, /, *, ranks: RankChoice = None, **named: Any) -> None:
        """Set variables of the ranks' `__main__`: `session.push(x=1)`, or `session.push({"x": 1}, ranks=0)`.

        Large tensors and arrays are copied once into memory that all ranks map.
        """
        if not isinstance(values, (Mapping, types.NoneType)):
            raise ConfigError(f"push({values!r}): pass names and values: session.push(x=1) or push({{'x': 1}}).")
        members = selected_ranks(ranks, self.num_processes)
        self._call_in_ranks("push", _checked_names({**(values or {}), **named}), ranks=members)

    def pull(self, *expressions: str, ranks: RankChoice = None) -> Results:
        """Return the value that an expression has on each rank: `session.pull("x")`, `session.pull("model.weight")`.

        Several expressions give a tuple of their values for each rank. Tensors arrive on the CPU. A value that cannot
        travel costs no other: asking for it raises `ReturnValueError`.

        Raises:
            ConfigError: There is no expression, or one is not text.
            Exception: Error of the expression's evaluation, such as a NameError.
        """
        if not expressions:
            raise ConfigError("pull() names no variable. Write session.pull('x').")
        for expression in expressions:
            if not isinstance(expression, str):
                raise ConfigError(f"pull({expression!r}): pass the name as text: session.pull('x').")
        members = selected_ranks(ranks, self.num_processes)
        return self._call_in_ranks("pull", expressions, ranks=members)

    def __getitem__(self, key: str | tuple[str, RankChoice]) -> Any:
        """Return a variable's `Results`: `session["x"]`; of one rank its value: `session["x", 0]`."""
        name, ranks = self._read_key(key)
        results = self.pull(name, ranks=ranks)
        return results[ranks] if isinstance(ranks, int) else results

    def __setitem__(self, key: str | tuple[str, RankChoice], value: Any) -> None:
        """Set a variable on all ranks: `session["x"] = value`; on some: `session["x", 0] = value`."""
        name, ranks = self._read_key(key)
        self.push({name: value}, ranks=ranks)

    def __contains__(self, key: str | tuple[str, RankChoice]) -> bool:
        """Return True if all ranks have a variable: `"x" in session`; some ranks: `("x", 0) in session`."""
        name, ranks = self._read_key(key)
        members = selected_ranks(ranks, self.num_processes)
        return all(self._call_in_ranks("has", name, ranks=members).returned.values())

    def __delitem__(self, key: str | tuple[str, RankChoice]) -> None:
        """Remove a variable from all ranks: `del session["x"]`; from some: `del session["x", 0]`."""
        name, ranks = self._read_key(key)
        self._call_in_ranks("remove", name, ranks=selected_ranks(ranks, self.num_processes))

    def _read_key(self, key: str | tuple[str, RankChoice]) -> tuple[str, RankChoice]:
        """Return the name and the ranks of a key; raises `ConfigError` for a key of several names."""
        if not isinstance(key, tuple):
            return key, None
        if len(key) != 2 or (isinstance(key[1], str) and key[1].isidentifier() and key[1] != "all"):
            names = ", ".join(map(repr, key))
            raise ConfigError(
                f"session[{names}]: the second item of the key selects ranks, as in session[{key[0]!r}, 0]. "
                f"session.pull({names}) returns several values."
            )
        return key

    def who(self) -> RankVariables:
        """Return a table of the ranks' variables: names, types, shapes, and which differ between ranks.

        Tensors and models of up to 1 GB are compared by their contents.
        """
        results = self._call_in_ranks("variables", ranks=None)
        return RankVariables(results.returned)

    def complete(self, code: str, offset: int) -> list[Completion]:
        """Return the completions of the code at a place, by the names on rank 0; while it is busy, by its last answer.

        After a run that failed, rank 0 is not asked either, because it would release what `debug` needs.
        """
        answer = self._ask_rank_0("complete", code, offset)
        if isinstance(answer, list):
            self._completions = answer
            return answer
        word = re.search(r"\w*$", code[:offset])
        start = offset if word is None else word.start()
        known = [completion for completion in self._completions if completion.text.startswith(code[start:offset])]
        return [dataclasses.replace(completion, start=start, end=offset) for completion in known]

    def inspect_name(self, name: str, detail_level: int = 0) -> Mapping[str, Any]:
        """Return what `name?` shows of rank 0's object, by MIME type; empty where `complete` returns nothing."""
        answer = self._ask_rank_0("inspect_name", name, detail_level)
        return answer if isinstance(answer, dict) else {}

    def _ask_rank_0(self, function: str, *args: Any) -> Any:
        """Return rank 0's answer to a question of the front end; None if it does not come soon."""
        if not self._is_at_rest:
            return None
        scope = CallScope(ranks=(0,), is_brief=True, name=function, arguments={}, displays=RankPanels(None).take)
        run = self._start(RankFunction(CELLS, function), args, None, in_cell=False, scope=scope)
        if not run.wait(ANSWER_WITHIN):
            run.stop(wait=False)
            return None
        return None if run.exception() is not None else run.result().returned.get(0)

    __iter__ = None
    """A session has values by name; without this line Python would iterate over `session[0]`, `session[1]`, ..."""

    def _call_in_ranks(
        self,
        function: str,
        *args: Any,
        ranks: tuple[int, ...] | None,
        code: str = "",
        panels: RankPanels | None = None,
    ) -> Results:
        """Call a function of this package in the ranks, as a run without first and last line."""
        check_not_in_rank("A cell on ranks" if code else "push, pull or who of a session")
        scope = CallScope(
            ranks=ranks,
            is_brief=True,
            name="cell" if code else function,
            arguments={"code": one_line(code, MAX_CODE)} if code else {},
            displays=None if panels is None else panels.take,
            widget_ranks=() if panels is None else panels.widget_ranks,
        )
        try:
            run = self._start(RankFunction(CELLS, function), args, None, in_cell=True, scope=scope)
        except CaptureError as error:
            raise CaptureError(PUSHED.sub(r"\1", str(error))) from None
        return run.wait_in_cell()


def _push_hint(error: NameError) -> str:
    """Return advice if the notebook has the name that the ranks miss; else nothing."""
    match = re.match(r"name '(\w+)' is not defined", str(error))
    if match is None or match[1] not in vars(sys.modules["__main__"]):
        return ""
    if match[1] in ("exit", "quit"):
        return "An exception ends a cell on the ranks, and `session.close()` ends the ranks."
    name = match[1]
    value = vars(sys.modules["__main__"])[name]
    if isinstance(value, types.ModuleType):
        module = value.__name__ if value.__name__ == name else f"{value.__name__} as {name}"
        return f"{name} is imported in the notebook, but not on the ranks. Write `import {module}` in their cell."
    return f"{name} is defined in the notebook, but not on the ranks. `%%ranks --push {name}` sends it first."


def _checked_names(values: Mapping[str, Any]) -> dict[str, Any]:
    for name in values:
        if not (isinstance(name, str) and name.isidentifier()) or keyword.iskeyword(name):
            raise ConfigError(f"{name!r} cannot be the name of a variable on the ranks.")
    return dict(values)


# --------------------------------------------------------------------------------------------------------------------
# The variables of the ranks' `__main__`, side by side: names, types, shapes, and which differ between ranks.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankVariable:
    """One name, as all ranks have it."""

    name: str
    type_name: str
    """The type, of the first rank that has the variable."""
    value: str
    """A tensor's shape, dtype and device, or a short form of a plain value; empty for other objects."""
    ranks: tuple[int, ...]
    """The ranks that have the variable."""
    state: Literal["same", "differs", "missing", "unknown"]
    """`"missing"`: some ranks do not have it. `"unknown"`: its contents were not compared."""


class RankVariables:
    """Table of the ranks' variables; `session.who()` returns it.

    Iterating gives a `RankVariable` for each name, `variables["x"]` gives one.
    """

    def __init__(self, by_rank: Mapping[int, Mapping[str, Variable]]) -> None:
        names = sorted({name for variables in by_rank.values() for name in variables})
        self._num_ranks = len(by_rank)
        self._rows = {name: _merged(name, by_rank) for name in names}

    def __iter__(self) -> Iterator[RankVariable]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> RankVariable:
        return self._rows[name]

    @property
    def differing(self) -> list[str]:
        """Names whose type, shape or contents differ between ranks, or that some ranks do not have."""
        return [row.name for row in self if row.state in ("differs", "missing")]

    def __repr__(self) -> str:
        if not self._rows:
            return f"No variables on {plural(self._num_ranks, 'rank')}"
        return bounded("\n".join(table_text(self._columns(), most=len(self))), "list(variables) has all")

    def _repr_html_(self) -> str:
        caption = f"{plural(len(self), 'variable')} on {plural(self._num_ranks, 'rank')}"
        return table_html(self._columns(), caption=caption, more="more variables")

    def _columns(self) -> list[Column]:
        words = {row.name: {"missing": f"only {rank_list(row.ranks)}", "unknown": "not compared"} for row in self}
        return [
            Column("name", [row.name for row in self]),
            Column("type", [row.type_name for row in self]),
            Column("value", [row.value for row in self]),
            Column("on the ranks", [words[row.name].get(row.state, row.state) for row in self]),
        ]


def _merged(name: str, by_rank: Mapping[int, Mapping[str, Variable]]) -> RankVariable:
    found = {rank: variables[name] for rank, variables in sorted(by_rank.items()) if name in variables}
    first = next(iter(found.values()))
    state: Literal["same", "differs", "missing", "unknown"] = "same"
    if len(found) < len(by_rank):
        state = "missing"
    elif len({(variable.type_name, variable.fingerprint) for variable in found.values()}) > 1:
        state = "differs"
    elif first.fingerprint is None:
        state = "unknown"
    value = first.value if len({variable.value for variable in found.values()}) == 1 else f"{first.value}, ..."
    return RankVariable(name=name, type_name=first.type_name, value=value, ranks=tuple(found), state=state)


# --------------------------------------------------------------------------------------------------------------------
# Ranks as people name them: `2`, `[0, 2]`, `"0,2"`, `"1-3"`, `"all"`.


ITEM = re.compile(r"(\d+)(?:-(\d+))?")


def selected_ranks(ranks: object, num_processes: int) -> tuple[int, ...] | None:
    """Return the ranks in order; None if they are all ranks.

    Raises:
        ConfigError: An entry names no rank.
        NoSuchRankError: An entry is none of these ranks.
    """
    if ranks is None or ranks == "all":
        return None
    chosen = sorted(set(_numbers(ranks)))
    if not chosen:
        raise _unclear(ranks)
    for rank in chosen:
        check_rank(rank, num_processes, "session", typed=f"ranks={ranks!r}")
    return None if len(chosen) == num_processes else tuple(chosen)


def _numbers(ranks: object) -> list[int]:
    items = [ranks] if isinstance(ranks, (int, str)) else list(ranks) if isinstance(ranks, Iterable) else [None]
    numbers: list[int] = []
    for item in items:
        if isinstance(item, int) and not isinstance(item, bool):
            numbers.append(item)
            continue
        for part in str(item).replace(" ", "").split(","):
            match = ITEM.fullmatch(part)
            if match is None or not isinstance(item, str):
                raise _unclear(ranks)
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ConfigError(f"ranks={ranks!r}: {part} is empty. Did you mean {last}-{first}?")
            numbers += range(first, last + 1)
    return numbers


def _unclear(ranks: object) -> ConfigError:
    return ConfigError(f"ranks={ranks!r} names no ranks. Write a rank (2), several ([0, 2] or '0,2'), or '1-3'.")


# --------------------------------------------------------------------------------------------------------------------
# The values of a cell on ranks, as the notebook shows them: equal ones once, others by rank.


PLAIN = "text/plain"


def show_values(
    sink: Sink, outputs: Mapping[int, CellOutput], *, num_ranks: int, rich_rank: int | Literal["all"] | None
) -> None:
    """Show the values of a cell's last expression, which `num_ranks` ranks ran; equal ones once.

    Of the rank `rich_rank` the value is shown as HTML or as a picture, if it has such a form.
    """
    rich = outputs.get(rich_rank) if isinstance(rich_rank, int) else None
    if rich is not None and not rich.is_rich:
        rich = None
    # Without rich values all is text, which the cell's own thread may print.
    write = sink.print if rich is None else functools.partial(sink.text, "stdout")
    alike: dict[str, list[int]] = {}
    for rank, output in sorted(outputs.items()):
        if output.data:  # A value that displays itself leaves no data.
            alike.setdefault(str(output.data.get(PLAIN, "")), []).append(rank)
    for text, ranks in alike.items():
        short = rank_list(ranks).partition(" ")[2].replace(", ", ",")
        head = f"[{'all' if len(ranks) == num_ranks > 1 else short}]"
        if rich is not None and rich_rank in ranks:
            write(f"{head}\n")
            sink.display(rich.data, rich.metadata)
        else:
            write(f"{head} " + text.replace("\n", "\n" + " " * (len(head) + 1)) + "\n")
        if len({outputs[rank].fingerprint for rank in ranks}) > 1:
            write(" " * (len(head) + 1) + "(the texts are equal, the contents differ)\n")
    sink.close()


def show_tabs(
    sink: Sink, panels: RankPanels, outputs: Mapping[int, CellOutput], ranks: Sequence[int]
) -> Mapping[int, CellOutput]:
    """Show rich output and rich values of all ranks in tabs; return the outputs that are left to show as text."""
    is_rich = any(output.is_rich for output in outputs.values())
    bundles: dict[int, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        value = [outputs[rank].data] if is_rich and rank in outputs else []
        if parts := [*panels.of(rank), *value]:
            bundles[rank] = parts
    if not bundles:
        return outputs
    plain = [f"[{rank}] {part.get(PLAIN, '')}" for rank, parts in bundles.items() for part in parts]
    sink.html(rank_tabs(bundles, f"ranks-{secrets.token_hex(4)}"), "\n".join(plain))
    return {} if is_rich else outputs
