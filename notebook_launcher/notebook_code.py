"""The code of a notebook: the definitions that a function uses, and their sources."""

from __future__ import annotations

import builtins
import cmath
import inspect
import io
import itertools
import linecache
import pickle
import re
import symtable
import sys
import textwrap
import token
import tokenize
import types
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping


# --------------------------------------------------------------------------------------------------------------------
# Everything that a function needs of the notebook: imports, definitions, constants, values.


HOME = "__main__"
MAX_LITERAL = 2_000
"""Characters of a constant that is written into the script; a longer one goes into the file of values."""
IN_NOTEBOOKS = {"display": "from IPython.display import display"}
"""Builtins of a notebook that a script has to import."""


class Needs:
    """Requirements of a function, collected by `add`; the attributes are the parts that a script has to contain."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.imports: dict[str, None] = {}
        """Lines, in the order in which they were found."""
        self.constants: dict[str, str] = {}
        self.definitions: dict[str, str] = {}
        """Sources by name; one that another needs comes before it."""
        self.values: dict[str, Any] = {}
        self.unknown: set[str] = set()
        self.unwritten: set[str] = set()
        """What cells have changed in libraries and code cannot change again."""
        self.registries: dict[str, int] = {}
        """Number of entries of the collections that the script's own code fills, by name."""
        self._namespace = namespace
        self._pending: set[str] = set()
        """Definitions whose own needs are being collected."""
        self._made: set[str] = set()
        """Variables that code of `add_code` makes."""

    def add(self, name: str, value: Any) -> None:
        """Add a global variable with everything that it needs; raise `ConfigError` for what cannot be written."""
        known: tuple[Container[str], ...] = (self._pending, self._made, self.definitions, self.constants, self.values)
        if any(name in each for each in known):
            return
        if isinstance(value, types.ModuleType):
            self.add_import(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
        elif _is_definition(value) and value.__module__ == HOME:
            self._add_definition(name, value)
        elif (line := _import_line(name, value)) is not None:
            self.add_import(line)
        elif (text := literal_of(value)) is not None:
            self.constants[name] = text
        elif not self._add_registry(name, value):
            self._add_value(name, value)

    def add_code(self, key: str, code: str, *, makes: Iterable[str] = ()) -> None:
        """Add statements with everything that they need; the variables that they make are not added again."""
        self._made.update(makes)
        try:
            names = names_in(code)
        except SyntaxError:
            raise ConfigError(f"{key} cannot be exported: it has a magic, which a script does not have.") from None
        for used in sorted(names - self._made - {key}):
            self._add_used(used, key)
        self.definitions[key] = code.rstrip() + "\n"

    def check_order(self) -> None:
        """Raise `ConfigError` if a definition needs a value at once, and a value needs a definition."""
        if not self.values_need_definitions:
            return
        for name, source in self.definitions.items():
            for needed in sorted(names_at_definition(source) & self.values.keys()):
                raise ConfigError(
                    f"{name} cannot be exported: its decorators, defaults or bases use {needed}, an object of a class "
                    "of this notebook. Use it inside the function instead."
                )

    @property
    def values_need_definitions(self) -> bool:
        """True if the values hold objects of the notebook's own classes."""
        return any(_HomeFinder.names_in(value) for value in self.values.values())

    def add_import(self, line: str) -> None:
        """Add the line of an import."""
        self.imports[line] = None

    def _add_definition(self, name: str, value: Any) -> None:
        if value.__name__ != name:
            self.add(value.__name__, value)
            self.definitions[name] = f"{name} = {value.__name__}\n"
            return
        self._pending.add(name)
        source = source_of(value)
        for used in sorted(names_in(source) - {name}):
            self._add_used(used, name)
        for chain in sorted(attribute_chains(source)):
            self._add_submodules(chain)
        self._pending.remove(name)
        self.definitions[name] = source

    def _add_used(self, name: str, by: str) -> None:
        if name == "get_ipython":
            raise ConfigError(
                f"{by} cannot be exported: it uses get_ipython() or a magic, which a script does not have."
            )
        if name in self._namespace:
            self.add(name, self._namespace[name])
        elif name in IN_NOTEBOOKS:
            self.add_import(IN_NOTEBOOKS[name])
        elif not hasattr(builtins, name):
            self.unknown.add(name)

    def _add_submodules(self, chain: str) -> None:
        """Import `xml.etree.ElementTree` where the name `xml` is used with these attributes."""
        first, *rest = chain.split(".")
        module = self._namespace.get(first)
        if not isinstance(module, types.ModuleType) or module.__name__ != first:
            return
        for at in range(len(rest), 0, -1):
            path = ".".join([first, *rest[:at]])
            if path in sys.modules:
                self.add_import(f"import {path}")
                return

    def _add_registry(self, name: str, value: Any) -> bool:
        """Add a collection of the notebook's definitions by the statements that make and fill it, if there are any.

        Return False for another value, or if decorators and statements at the top level of cells have not filled it.
        """
        held = [each for each in _HomeFinder.look_into(value)[0] if each in self._namespace]
        first, fills = statements_about(name) if held else ("", [])
        is_plain = type(value) in {dict, list, set}
        if not first or not ((is_plain and fills) or any(self._registers(each, name) for each in held)):
            return False
        self._pending.add(name)
        self.add_code(name, first)
        self._pending.remove(name)
        for each in held:
            self.add(each, self._namespace[each])
        for number, fill in enumerate(fills):
            self.add_code(f"{name} {number}", fill)
        if hasattr(type(value), "__len__"):
            self.registries[name] = len(value)
        return True

    def _registers(self, definition: str, name: str) -> bool:
        """Return True if a definition's decorators use a variable, directly or in the functions that they call."""
        waiting, seen = [definition], set[str]()
        while waiting:
            each = waiting.pop()
            value = self._namespace.get(each)
            if each in seen or not (_is_definition(value) and value.__module__ == HOME):
                continue
            seen.add(each)
            try:
                source = source_of(value)
            except ConfigError:
                continue
            used = names_at_definition(source) if each == definition else names_in(source)
            if name in used:
                return True
            waiting += used
        return False

    def _add_value(self, name: str, value: Any) -> None:
        for needed in _HomeFinder.names_in(value, name):
            if needed not in self._namespace:
                raise ConfigError(
                    f"{name} cannot be exported: it holds {needed}, which the notebook does not have any more."
                )
            self.add(needed, self._namespace[needed])
        self.values[name] = value


def literal_of(value: Any) -> str | None:
    """Return a literal from which Python reads an equal value; None if there is none."""
    # Not with `ast`, whose trees are not safe to make in a thread before Python 3.11.8 and 3.12.2.
    try:
        text = repr(value) if _is_plain(value) else ""
    except (ValueError, RecursionError, MemoryError):  # A number of many digits; an object that contains itself.
        return None
    return text if 0 < len(text) <= MAX_LITERAL else None


def _is_plain(value: Any) -> bool:
    """Return True for a value of Python's own types whose `repr` is a literal that gives the same value."""
    kind = type(value)
    if kind in {tuple, list, set}:
        return all(map(_is_plain, value))
    if kind is dict:
        return all(map(_is_plain, itertools.chain(value, value.values())))
    if kind in {float, complex}:
        # The literal of a complex number is a sum, and -0.0 + 1j is 0.0 + 1j.
        return cmath.isfinite(value) and (kind is float or repr(value + 0) == repr(value))
    return kind in {bool, int, str, bytes, type(None)}


def _is_definition(value: Any) -> bool:
    named = hasattr(value, "__name__") and hasattr(value, "__qualname__") and hasattr(value, "__module__")
    return named and (isinstance(value, types.FunctionType | type) or hasattr(value, "__wrapped__"))


def _import_line(name: str, value: Any) -> str | None:
    """Return the import of an object of a module; None if no module has it under a name."""
    home = getattr(value, "__module__", None)
    own = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(home, str) or not isinstance(own, str) or home == HOME:
        return None
    # Outer packages come first, because users import `DataLoader` from torch.utils.data and inner modules may move.
    for module in itertools.accumulate(home.split("."), "{}.{}".format):
        if getattr(sys.modules.get(module), own, None) is value:
            return f"from {module} import {own}" + ("" if own == name else f" as {name}")
    return None


class _HomeFinder(pickle.Pickler):
    """Pickles a value into nothing, and notes the notebook's own classes and functions that it meets."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: dict[str, None] = {}

    def reducer_override(self, value: Any, /) -> Any:
        """Note a definition of the notebook; everything is pickled as usual."""
        if isinstance(value, types.FunctionType | type) and value.__module__ == HOME:
            self.found[value.__qualname__.partition(".")[0]] = None
        return NotImplemented

    @classmethod
    def names_in(cls, value: Any, name: str = "the value") -> set[str]:
        """Return the names of the definitions that a value needs; raise `ConfigError` if it cannot be pickled."""
        found, error = cls.look_into(value)
        if error is not None:
            raise ConfigError(
                f"{name} cannot be exported: its value, a {type(value).__name__}, cannot be written to a file "
                f"({type(error).__name__}: {error}). Make it inside the function."
            ) from error
        return set(found)

    @classmethod
    def look_into(cls, value: Any) -> tuple[list[str], Exception | None]:
        """Return the names of the definitions that a value needs, in order, and why it cannot be pickled, if so."""
        finder = cls()
        try:
            finder.dump(value)
        except Exception as error:  # a user's __reduce__ may raise anything
            return list(finder.found), error
        return list(finder.found), None


# --------------------------------------------------------------------------------------------------------------------
# Source of a definition in the notebook or in a program, and the global names that the source uses.
#
# The run's thread reads sources while the cell goes on. So no syntax tree of Python objects is made here: before
# Python 3.11.8 and 3.12.2, two threads that make trees at the same time can get "SystemError: AST constructor
# recursion depth mismatch" (https://github.com/python/cpython/issues/106905), and IPython makes one for each cell.


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
    symbols = symtable.symtable(source, "<exported>", "exec").get_symbols()
    if {symbol.get_name() for symbol in symbols if symbol.is_assigned()} != {name}:
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
    table = symtable.symtable(source, "<exported>", "exec")
    # The body of a class is executed with the class; the body of a function is not.
    scopes = [table, *(child for child in table.get_children() if child.get_type() == "class")]
    return {name for scope in scopes for name in _global_names(scope)}


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
