"""IPython's `%%ranks`, `%ranks`, `%push` and `%pull`: cells on the ranks of a session, and their variables.

All they do, methods of `Session` do: `execute_cell`, `push` and `pull`.
"""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from notebook_launcher.ipython_shell import running_cell_file
from notebook_launcher.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable


NAME = "ranks"
TARGET = re.compile(r"(?:^|\s)([A-Za-z_]\w*)\s*=(?!=)\s*(.*)$", re.DOTALL)
"""`x = expression` at the end of the line of `%%ranks`."""
COMMA = re.compile(r"\s*,\s*")
NO_SESSION = "no session is active. `%ranks 4` starts one with 4 ranks; session.activate() uses an open session."


def register(shell: Any, make_session: Callable[..., Any]) -> RankMagics:
    """Register the magics with a shell, unless they are registered; `make_session` opens a session for `%ranks 4`."""
    magics = _installed(shell)
    if magics is None:
        magics = RankMagics(shell, make_session)
        shell.register_magic_function(magics.run_cell, "cell", NAME)
        shell.register_magic_function(magics.manage, "line", NAME)
        for name, method in (("push", magics.push), ("pull", magics.pull)):
            if name not in shell.magics_manager.magics["line"]:  # Another extension may have one of this name.
                shell.register_magic_function(method, "line", name)
        shell.input_transformers_cleanup.insert(0, _allow_no_body)
        magics.connect()
    return magics


def unregister(shell: Any) -> None:
    """Remove the magics, and close the session that `%ranks` opened."""
    magics = _installed(shell)
    if magics is not None:
        for kind in ("line", "cell"):
            own = shell.magics_manager.magics[kind]
            for name in [name for name, magic in own.items() if getattr(magic, "__self__", None) is magics]:
                del own[name]
        shell.input_transformers_cleanup.remove(_allow_no_body)
        magics.disconnect()
        magics.retire()


def _installed(shell: Any) -> RankMagics | None:
    magics = getattr(shell.magics_manager.magics["cell"].get(NAME), "__self__", None)
    return magics if isinstance(magics, RankMagics) else None


class RankMagics:
    """`%%ranks` and `%ranks`; `make_session` opens a session, as `Session` does."""

    def __init__(self, shell: Any, make_session: Callable[..., Any]) -> None:
        self._shell = shell
        self._make_session = make_session
        self._parser = parser = MagicArgumentParser("%%ranks")
        parser.add_argument("ranks", nargs="?", default="all")
        parser.add_argument("-s", "--session")
        parser.add_argument("-p", "--push", action="append", default=[])
        parser.add_argument("-d", "--display")
        parser.add_argument("-t", "--time", action="store_true")
        parser.add_argument("-q", "--quiet", action="store_true")
        self._no_options = self._parser.parse_argstring("")
        """The options of a line that has none: parsing it takes as long as compiling a short cell."""
        self._matcher: Any = None
        """The completer's matcher; None until `connect`, and before IPython 8.6."""
        self.active: Any = None
        """The session of cells that name none."""
        self._own: Any = None
        """The session that `%ranks` opened, which `%ranks` also closes."""

    def connect(self) -> None:
        """Have the shell complete and inspect the ranks' names inside `%%ranks` cells."""
        with contextlib.suppress(ImportError):
            self._matcher = cell_matcher(self._session_at_hand)
            self._shell.Completer.custom_matchers.append(self._matcher)
        kernel = getattr(self._shell, "kernel", None)
        if kernel is not None:
            kernel.do_inspect = inspecting(kernel.do_inspect, self._session_at_hand)

    def disconnect(self) -> None:
        """Undo `connect`."""
        if self._matcher is not None:
            self._shell.Completer.custom_matchers.remove(self._matcher)
        kernel = getattr(self._shell, "kernel", None)
        if kernel is not None:
            vars(kernel).pop("do_inspect", None)

    def _session_at_hand(self, line: str) -> Any:
        """Return the session of a cell with this text behind `%%ranks`; None if there is none."""
        with contextlib.suppress(UsageError, ValueError):  # The line is being typed.
            return self._session(self._options(_split_target(line)[0]).session)
        return self.active

    def retire(self) -> None:
        """Close the session that `%ranks` opened."""
        own, self._own = self._own, None
        if own is not None:
            if self.active is own:
                self.active = None
            own.close()

    def run_cell(self, line: str, cell: str) -> None:
        """Run the cell on every rank of a session, in the ranks' own `__main__`.

        The cell sees the variables of the ranks, not the notebook's. Equal values of its last expression
        are shown once, others by rank.

            %%ranks               on all ranks
            %%ranks 0,2           on these; 1-3 works too
            %%ranks x = loss      set the notebook's x to the values of all ranks
            -p a,b --push         set variables of the notebook on the ranks first
            -s name --session     another session than the active one: the name of its variable
            -d 2 --display        the rank whose tables and figures are shown; all: a tab for each rank
            -t --time             show how long each rank took
            -q --quiet            show no values
        """
        options_text, target, expression = _split_target(line)
        _check_expression(target, expression)
        options = self._options(options_text)
        session = self._session(options.session)
        code = f"{cell}\n{expression}" if expression and cell.strip() else expression or cell
        results = session.execute_cell(
            code,
            options.ranks,
            push=self._values("--push", ",".join(options.push).split(",")),
            pulls=target is not None,
            is_quiet=options.quiet,
            display=options.display,
            shows_time=options.time,
            first_line=f"%%ranks {line}".rstrip() if cell.strip() else "",
            filename=running_cell_file(self._shell),
        )
        if target is not None:
            self._shell.user_ns[target] = results

    def manage(self, line: str) -> Any:
        """Start ranks for `%%ranks`: `%ranks 4`, `%ranks 2 devices=cpu`.

        `%ranks close` ends them, and `%ranks` alone shows the active session.
        """
        words = shlex.split(line)
        if not words:
            if self.active is None:
                print(NO_SESSION)  # noqa: T201 - the answer of a magic
            return self.active
        if words == ["close"]:
            if self._own is None:
                raise UsageError("%ranks has started no session; a session of your own ends with session.close().")
            return self.retire()
        if not words[0].isdigit() or not all("=" in word for word in words[1:]):
            raise UsageError(f"%ranks {line}: write `%ranks 4`, `%ranks 4 devices=cpu seed=1`, or `%ranks close`.")
        options = {name: _value(text) for name, _, text in (word.partition("=") for word in words[1:])}
        session = self._make_session(int(words[0]), **options)  # Before the end of the present one: it may be refused.
        self.retire()
        self.active = self._own = session.__enter__()
        print(f"{plural(session.num_processes, 'rank')}: {session!r}")  # noqa: T201 - the answer of a magic
        return None

    def push(self, line: str) -> None:
        """Set variables of the notebook on the ranks: `%push a, b`; on some of them: `%push a -r 0,2`.

        -r 0,2 --ranks        these ranks; 1-3 works too
        -s name --session     another session than the active one: the name of its variable
        """
        names, options = self._names("push", line)
        self._session(options.session).push(self._values("%push", names), ranks=options.ranks)

    def pull(self, line: str) -> None:
        """Set variables of the notebook to the values of all ranks: `%pull loss`; to one rank's: `%pull loss -r 0`.

        -r 0 --ranks          this rank's value alone; of several ranks, 0,2 or 1-3: their values by rank
        -s name --session     another session than the active one: the name of its variable
        """
        names, options = self._names("pull", line)
        session = self._session(options.session)
        one = int(options.ranks) if options.ranks.isdecimal() else None
        values = {name: session.pull(name, ranks=options.ranks) for name in names}
        self._shell.user_ns.update({name: by_rank if one is None else by_rank[one] for name, by_rank in values.items()})

    def _names(self, magic: str, line: str) -> tuple[list[str], Any]:
        """Return the names on the line of `%push` or `%pull`, and its options."""
        parser = MagicArgumentParser(f"%{magic}")
        parser.add_argument("names", nargs="*")
        parser.add_argument("-r", "--ranks", default="all")
        parser.add_argument("-s", "--session")
        try:
            options = parser.parse_argstring(COMMA.sub(",", line))
        except UsageError as error:
            raise UsageError(f"{error}. `%{magic}?` lists the options.") from None
        names = [name for words in options.names for name in words.split(",") if name]
        if not names or not all(map(str.isidentifier, names)):
            raise UsageError(f"{f'%{magic} {line}'.rstrip()}: name variables, as in `%{magic} a, b`.")
        return names, options

    def _options(self, text: str) -> Any:
        if not text.strip():
            return self._no_options
        try:
            options = self._parser.parse_argstring(COMMA.sub(",", text))
        except UsageError as error:
            raise UsageError(f"{error}. `%%ranks?` lists the options.") from None
        if options.push and options.ranks in self._shell.user_ns:
            names = ",".join([*options.push, options.ranks])
            raise UsageError(f"%%ranks {text.strip()}: names of variables go with commas: --push {names}")
        return options

    def _session(self, name: str | None) -> Any:
        if name is None:
            if self.active is None:
                raise UsageError(NO_SESSION)
            return self.active
        session = self._shell.user_ns.get(name)
        if not hasattr(session, "execute_cell"):
            raise UsageError(f"-s {name}: there is no session of this name. Write {name} = Session(4) first.")
        return session

    def _values(self, typed: str, names: list[str]) -> dict[str, Any]:
        """Return the notebook's variables of these names, which were typed behind this word."""
        wanted = [name.strip() for name in names if name.strip()]
        missing = [name for name in wanted if name not in self._shell.user_ns]
        if missing:
            raise UsageError(f"{typed} {','.join(names)}: the notebook has no variable {missing[0]!r}.")
        return {name: self._shell.user_ns[name] for name in wanted}


def _split_target(line: str) -> tuple[str, str | None, str]:
    """Return the options, the variable that gets the values, and the expression on the line."""
    match = TARGET.search(line)
    return (line, None, "") if match is None else (line[: match.start()], match[1], match[2])


def _check_expression(target: str | None, text: str) -> None:
    """Raise `UsageError` if the line of a cell assigns anything but one expression: the variable would be None."""
    if not text:
        return
    with contextlib.suppress(SyntaxError):  # The ranks report it, with the place; magics are no Python either.
        match ast.parse(text).body:
            case [ast.Expr()]:
                return
            case _:
                raise UsageError(
                    f"{target} = {text}: the line of %%ranks assigns one expression. Write statements below the line, "
                    f"and the expression behind {target} ="
                )


def _allow_no_body(lines: list[str]) -> list[str]:
    """Give a cell that is `%%ranks x = expression` alone an empty line: IPython refuses cells without a body."""
    return [f"{lines[0].rstrip()}\n", "\n"] if len(lines) == 1 and lines[0].startswith("%%ranks") else lines


def _value(text: str) -> Any:
    """Return `4` as a number, `(0, 1)` as a tuple, `cpu` as text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# --------------------------------------------------------------------------------------------------------------------
# Completion and inspection inside `%%ranks` cells, by the names of the ranks, not of the notebook.


IDENTIFIER = "notebook_launcher.ranks"
MAGIC = "%%ranks"


def cell_matcher(session: Callable[[str], Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a matcher for IPython's completer: the ranks' completions inside the body of a `%%ranks` cell.

    `session` returns the session of a cell with this text behind `%%ranks`, or None. Raises ImportError before
    IPython 8.6, which has no such matchers.
    """
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier=IDENTIFIER, priority=100)  # type: ignore[untyped-decorator]
    def matcher(context: Any) -> dict[str, Any]:
        lines = context.full_text.split("\n")
        if not lines[0].startswith(MAGIC) or context.cursor_line == 0:
            return {"completions": []}
        active = session(lines[0].removeprefix(MAGIC))
        if active is None:
            return {"completions": []}
        body = "\n".join(lines[1:])
        offset = sum(len(line) + 1 for line in lines[1 : context.cursor_line]) + context.cursor_position
        found = active.complete(body, offset)
        if not found:
            # Without an answer the word itself is offered, because IPython would otherwise offer the notebook's names.
            return {"completions": [SimpleCompletion(text=context.token, type="rank")], "suppress": True}
        start = found[0].start
        return {
            "completions": [
                SimpleCompletion(text=completion.text, type=completion.kind)
                for completion in found
                if completion.start == start
            ],
            "matched_fragment": body[start:offset],
            "suppress": True,
        }

    return matcher  # type: ignore[no-any-return]


def inspecting(original: Callable[..., Any], session: Callable[[str], Any]) -> Callable[..., Any]:
    """Return a `do_inspect` for ipykernel that answers inside `%%ranks` cells by the objects of the ranks."""

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **options: Any) -> Any:
        line = code.partition("\n")[0]
        active = session(line.removeprefix(MAGIC)) if line.startswith(MAGIC) else None
        if active is None:
            return original(code, cursor_pos, detail_level, *args, **options)
        from IPython.utils.tokenutil import token_at_cursor

        data = active.inspect_name(token_at_cursor(code, cursor_pos), detail_level)
        return {"status": "ok", "data": dict(data), "metadata": {}, "found": bool(data)}

    return do_inspect
