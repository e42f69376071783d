"""What the code of a notebook's cells does to attributes of modules, as far as the code itself shows it.

`config.lr = 0.01` says by its text which attribute the kernel has changed, whatever the value is. Code of functions
counts once a cell calls them. What no text shows (`mock.patch`, a helper of a library) is found by a scan of the loaded
modules (`replacements.py`); `Code.handed` tells when that is worth its time.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """The step to all that a dictionary, list or set holds: a cell has changed it by a method or a computed key."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attributes:
    """The step to any attribute, where a cell has set it by a computed name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """The step to an item of a list or a member of a set."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Overload:
    """The step to the implementation of a `functools.singledispatch` function for a class."""

    cls: type


@dataclasses.dataclass(frozen=True, slots=True)
class Subclass:
    """The step to a class that its base finds by `__subclasses__()`: it need only exist."""

    cls: type


Step: TypeAlias = "str | tuple[Any] | Contents | Attributes | Member | Overload | Subclass"
"""An attribute, or the key of an entry in a tuple of its own."""

ANYTHING = ""
"""In `Code.handed`, an object without a name, such as a lambda."""
ASSIGNED = "="
"""In `Code.handed`, in the place of what is called: an assignment to an attribute of an argument."""
DECORATED = "@"
"""In `Code.handed`, before the name of a definition that has a decorator."""
SETTER = ("set_", "enable_", "disable_", "use_")
"""First parts of the names of functions that change a setting of their module."""
CHANGING = frozenset(
    {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault"}
    | {"sort", "update"}
)
"""Methods that change a dictionary, list or set."""
REGISTERING = re.compile(r"(?!un|de).*register|patch(_|$)|.*_patch$|autolog$")
"""Names of functions that change other objects of their library."""
OF_IMPORTS = frozenset({"meta_path", "path_hooks"})
OF_TORCH = frozenset({"Library", "define", "impl"})
RUN_BODY = frozenset({"capture", "everywhere", "prun", "time", "timeit"})
"""Magics that run their text as code of the notebook, in the kernel."""


class Store(NamedTuple):
    """An assignment to an attribute or entry, or its deletion: `F.gelu = mine` has the root `F`."""

    root: str
    steps: tuple[Step, ...]
    is_deleted: bool = False


class Registration(NamedTuple):
    """A call by whose name something is registered: `codecs.register(find)`."""

    called: Store
    text: str
    given: frozenset[str]
    """Names of the arguments as in `Code.handed`, and of all else that the text uses."""
    is_repeatable: bool = True
    """False if the text uses variables of a function."""


@dataclasses.dataclass(slots=True)
class Code:
    """What a cell or a function does when it runs."""

    stores: list[Store] = dataclasses.field(default_factory=list)
    calls: set[str] = dataclasses.field(default_factory=set)
    """The last names of what it calls: `set_up`, and `apply` of `patcher.apply()`."""
    handed: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    """Objects that it gives to what it calls, each with the first name of what is called, for example a decorator."""
    setters: set[tuple[str, tuple[Step, ...]]] = dataclasses.field(default_factory=set)
    """What it calls by a name such as `timm.layers.set_fused_attn`: the first name, and the rest."""
    registrations: list[Registration] = dataclasses.field(default_factory=list)
    derived: set[str] = dataclasses.field(default_factory=set)
    """Classes that it derives from others."""
    everywhere: list[Code] = dataclasses.field(default_factory=list)
    """The code of `%%everywhere`, which ranks run themselves, and which is a part of this code, too."""
    imports: dict[str, tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    """Module and attribute of what it imports, by the name that it gets."""
    functions: dict[str, Code] = dataclasses.field(default_factory=dict)
    """Functions and methods that it defines; special methods are those of the class."""

    def executed(self, functions: dict[str, Code]) -> Iterator[Code]:
        """Yield this code, and the code of the notebook's functions that it calls, directly or not."""
        seen: set[str] = set()
        pending = [self]
        while pending:
            code = pending.pop()
            yield code
            pending += [functions[name] for name in code.calls - seen if name in functions]
            seen |= code.calls


def read_code(source: str) -> Code:
    """Return what a cell's code does, after IPython's own syntax was replaced; nothing for code that is no Python."""
    reader = _Reader()
    reader.read(source)
    return reader.code


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.code = Code()
        self._class = ""
        """Name of the class around; empty inside a function."""
        self._assigned: list[tuple[str, ast.expr]] = []
        """Assignments to attributes in the function around: the name at which the target begins, and the value."""
        self._function: Code | None = None
        """Code of the function around, whose inner functions and classes count as its own."""
        self._each: dict[str, list[tuple[str, tuple[Step, ...]]]] = {}
        """What a variable of a loop stands for: `for layer in (nn.ReLU, nn.Tanh)`."""
        self._decorators: list[ast.expr] = []

    @property
    def _here(self) -> Code:
        return self._function or self.code

    def read(self, source: str) -> None:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            self.visit(ast.parse(source))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._hand_decorated(node)
        if node.bases:
            self._here.derived.add(node.name)
        before, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._hand_decorated(node)
        if self._function is not None:
            self.generic_visit(node)
            return
        is_special = self._class and node.name.startswith("__") and node.name.endswith("__")
        if is_special:
            self._function = self.code.functions.setdefault(self._class, Code())
        else:
            self._function = self.code.functions[node.name] = Code()
        before, self._class, self._assigned = self._class, "", []
        self.generic_visit(node)
        stores, local = self._function.stores, _local_names(node)
        inner = {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef) and each is not node}
        for root, value in self._assigned:
            name = value.id if isinstance(value, ast.Name) else ANYTHING
            if root in local and (isinstance(value, ast.Lambda) or name):
                self._function.handed.add((ASSIGNED, ANYTHING if name in local | inner else name))
        local -= self._function.imports.keys()
        stores[:] = [store for store in stores if store.root not in local]
        self._function.registrations = [
            each._replace(is_repeatable=not local & each.given)
            for each in self._function.registrations
            if each.called.root not in local
        ]
        self._class, self._function = before, None

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self._here.imports[alias.asname or name] = (name, ())

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.module and not node.level:
                self._here.imports[alias.asname or alias.name] = (node.module, (alias.name,))

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned += [(root, node.value) for root, steps in map(_chain, node.targets) if root and steps]
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):  # `from config import NAMES`, and then `NAMES += ["mine"]`
            self._here.stores.append(Store(node.target.id, (Contents(),)))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        match node:
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=values) | ast.List(elts=values)):
                self._each[name] = [_chain(value) for value in values]
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute | ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._store(node, is_deleted=isinstance(node.ctx, ast.Del))
        self.generic_visit(node)

    visit_Subscript = visit_Attribute  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(
                func=ast.Attribute(attr="run_cell_magic" | "run_line_magic"),
                args=[ast.Constant(value=str(magic)), *_, ast.Constant(value=str(body))],
            ):
                if magic in RUN_BODY:
                    num_before = len(self._here.registrations)
                    self.read(body)
                    if magic == "everywhere":
                        self._here.everywhere.append(read_code(body))
                        del self._here.registrations[num_before:]
                return
        self._note_change(node)
        match node.func:
            case ast.Name(id=last) | ast.Attribute(attr=last):
                self._here.calls.add(last)
                if last.startswith(SETTER):
                    self._here.setters.add(_chain(node.func))
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        self._hand(node.func, values)
        called = node.func
        if isinstance(called, ast.Call):  # `register("name")(Model)`, as a decorator.
            self._decorators.append(called)
            called = called.func
        if node not in self._decorators:
            self._note_registration(called, node, values)
        self.generic_visit(node)

    def _note_change(self, node: ast.Call) -> None:
        match node:
            case ast.Call(
                func=ast.Name(id="setattr" | "delattr" as name), args=[owner, ast.Constant(value=str(step)), *_]
            ):
                self._store(ast.Attribute(value=owner, attr=step), is_deleted=name == "delattr")
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, _, _]):
                self._here.handed.add(("setattr", ANYTHING))
                self._store_in(owner, Attributes())
            case ast.Call(func=ast.Name(id="setattr" | "delattr" | "exec" | "eval" as called)):
                self._here.handed.add((str(called), ANYTHING))
            case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in CHANGING:
                self._store_in(owner, Contents())

    def _note_registration(self, called: ast.expr, call: ast.Call, values: Iterable[ast.expr]) -> None:
        root, steps = _chain(called)
        name = str(steps[-1] if steps else root)
        if (
            REGISTERING.match(name)
            or (name, root) == ("pandas", "tqdm")
            or name in OF_TORCH
            or not OF_IMPORTS.isdisjoint(steps)
        ):
            nodes = [each for value in values for each in ast.walk(value)]
            names = {root, *(each.id for each in nodes if isinstance(each, ast.Name))}
            names -= {each.arg for each in nodes if isinstance(each, ast.arg)}
            names |= {ANYTHING for each in nodes if isinstance(each, ast.Lambda)}
            self._here.registrations.append(Registration(Store(root, steps), ast.unparse(call), frozenset(names)))

    def _hand_decorated(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            match called:
                case ast.Name(id=last) | ast.Attribute(attr=last):
                    self._here.calls.add(last)
            # The name may hold something else afterwards: fastcore's `patch` returns nothing.
            values = [ast.Name(id=node.name), ast.Name(id=DECORATED + node.name)]
            self._hand(called, values)
            self._decorators.append(decorator)
            call = ast.Call(func=decorator, args=[ast.Name(id=node.name)], keywords=[])
            self._note_registration(called, call, values)

    def _hand(self, called: ast.expr, values: Iterable[ast.expr]) -> None:
        root = _chain(called)[0]
        for value in values:
            match value:
                case ast.Lambda():
                    self._here.handed.add((root, ANYTHING))
                case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name)):
                    self._here.handed.add((root, name))

    def _store(self, target: ast.expr, *, is_deleted: bool) -> None:
        match target:
            case ast.Subscript(value=owner, slice=key) if not isinstance(key, ast.Constant):
                self._store_in(owner, Contents())
            case _:
                root, steps = _chain(target)
                for first, more in self._each.get(root, [(root, ())]):
                    if first and (*more, *steps):
                        self._here.stores.append(Store(first, (*more, *steps), is_deleted))

    def _store_in(self, owner: ast.expr, step: Step) -> None:
        root, steps = _chain(owner)
        for first, more in self._each.get(root, [(root, ())]):
            if first:
                self._here.stores.append(Store(first, (*more, *steps, step)))


def _chain(node: ast.expr) -> tuple[str, tuple[Step, ...]]:
    """Return the name at which an expression such as `config.RATES["lr"]` begins, empty if none does; and the rest."""
    steps: list[Step] = []
    while True:
        match node:
            case ast.Attribute(value=inner, attr=name):
                steps.insert(0, name)
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                steps.insert(0, (key,))
            case ast.Name(id=name):
                return name, tuple(steps)
            case _:
                return "", ()
        node = inner


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of arguments and variables of a function, without those that it declares as global."""
    nodes = list(ast.walk(function))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return names - {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
