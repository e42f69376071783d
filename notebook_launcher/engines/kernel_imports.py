"""What the kernel has imported, which the fork server imports too, and the part of it that a call needs at once.

Names alone travel. Modules of the notebook's folders, and of installations in place, stay with the ranks, which import
the files as they are; so does a module that was reloaded in the kernel.
"""

from __future__ import annotations

import functools
import opcode
import sys
import types
from typing import TYPE_CHECKING, Any

from notebook_launcher.ipython_shell import FRONT_END
from notebook_launcher.messaging import messages
from notebook_launcher.travel.cells import codes_in
from notebook_launcher.travel.changed_modules import is_local, is_of_installation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.machinery import ModuleSpec

    from notebook_launcher.travel.function_call import FunctionCall

LEFT_TO_THE_KERNEL = (*FRONT_END, "notebook_launcher", "anywidget", "psygnal", "pydev", "_pydev", "jupyter_core",
                      "prompt_toolkit", "nest_asyncio", "google.colab", "marimo")  # fmt: skip
"""Packages of the front end, by the begin of their names, and this one: the fork server has of them what ranks need."""
COMPILER = "torch._dynamo"
ACCELERATOR = "notebook_launcher.training.accelerator"
"""Half a second of a core to import."""
MAKE_OPTIMIZERS = frozenset(
    {"optim", "torch.optim", "SGD", "Adam", "AdamW"}
    | {"DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"}
    | {"Accelerator", "Fabric", "Trainer"}
)
"""Names whose use makes an optimizer or a distributed model, which imports torch's compiler: 1.6 s of a core."""
THERE_ALREADY = frozenset({"torch", "numpy", "builtins", "__main__"})
"""Packages that need no wait: the fork server has them, but for parts that it imports when it has time."""
MAX_LOOKED_AT = 300
"""Objects that are looked at: a few microseconds each."""
MAX_ITEMS = 8
IMPORT_NAME, EXTENDED_ARG = opcode.opmap["IMPORT_NAME"], opcode.opmap["EXTENDED_ARG"]


class KernelImports:
    """What this process has imported, as a fork server is told it: each time what is new."""

    def __init__(self) -> None:
        self._count = 0
        """Number of modules when this object last looked: nothing is new while it stays the same."""
        self._seen: set[str] = set()
        self._specs: dict[str, ModuleSpec] = {}
        """The modules that the fork server was told of, with what `importlib.reload` replaces."""
        self._local: dict[str, str] = {}
        self._reloaded: frozenset[str] = frozenset()

    def news(self, environ: Mapping[str, str]) -> messages.Imports | None:
        """Return what was imported since the last call; None if nothing was."""
        if len(sys.modules) == self._count:
            return None
        self._count = len(sys.modules)
        names = []
        for name, module in list(sys.modules.items()):
            if name in self._seen:
                continue
            self._seen.add(name)
            if self._is_for_all(name, module):
                names.append(name)
        return messages.Imports(names=tuple(names), local=dict(self._local), environ=dict(environ)) if names else None

    def _is_for_all(self, name: str, module: Any) -> bool:
        """Return True for a module of an installed package that another process finds by its name."""
        package = name.partition(".")[0]
        if name.startswith(LEFT_TO_THE_KERNEL) or package in self._reloaded or not isinstance(module, types.ModuleType):
            return False
        # Not getattr: some of torch's modules import others when asked for an attribute.
        spec, file = (vars(module).get(attribute) for attribute in ("__spec__", "__file__"))
        if not isinstance(file, str):  # Built in, or a folder without code.
            return False
        if not is_of_installation(file):
            if name == package == module.__name__ != "__main__":
                self._local[name] = file
            return False
        if spec is None or spec.name != name:
            return False
        self._specs[name] = spec
        return True

    def note_reloaded(self) -> bool:
        """Return True if a module that the fork server was told of was reloaded here since: it needs a new server.

        All of its package are left to the ranks from now on.
        """
        modules = sys.modules
        reloaded = {
            name.partition(".")[0]
            for name, spec in self._specs.items()
            if (module := modules.get(name)) is not None and vars(module).get("__spec__") is not spec
        }
        reloaded -= sys.stdlib_module_names
        self._reloaded |= reloaded
        return bool(reloaded)

    def begin_again(self) -> None:
        """Forget what was told, because another fork server is to be told."""
        self._count = 0
        self._seen.clear()
        self._specs.clear()

    def packages(self) -> set[str]:
        """Return the installed packages that the fork server was told of."""
        return {name.partition(".")[0] for name in self._specs} - sys.stdlib_module_names


def modules_needed(call: FunctionCall) -> tuple[str, ...]:
    """Return the packages and modules that a call uses, judged by its code and its arguments, beside torch's own.

    The fork server imports what the kernel has of them before it forks the ranks, which would all import them at the
    same time. A wrong answer costs time alone.
    """
    needed = set[str]()
    waiting = [inner for value in (call.fn, *call.args, *call.kwargs.values()) for inner in _inside(value)]
    seen = set[int]()
    while waiting and len(seen) < MAX_LOOKED_AT:
        value = waiting.pop()
        if id(value) not in seen:
            seen.add(id(value))
            waiting += _look(value, needed)
    return tuple(sorted(needed - THERE_ALREADY))


def _look(value: Any, needed: set[str]) -> list[Any]:
    """Note what the value needs, and return the values that it uses."""
    if isinstance(value, types.ModuleType):
        needed.add(value.__name__.partition(".")[0])
        return []
    if not isinstance(value, types.FunctionType | type):
        needed.add((type(value).__module__ or "").partition(".")[0])
        return []
    home = value.__module__ or ""
    if isinstance(value, type) and value.__name__ in MAKE_OPTIMIZERS:  # The code may know it by another name.
        needed.add(COMPILER)
    if home == ACCELERATOR:
        needed.add(ACCELERATOR)
    if not _is_users(home):
        needed.add(home.partition(".")[0])
        return []
    if isinstance(value, type):
        bases = [base for base in value.__mro__[1:] if base is not object]
        return [inner for used in (*vars(value).values(), *bases) for inner in _inside(used)]
    names, imported = set[str](), set[str]()
    for code in codes_in(value.__code__):
        names.update(code.co_names)
        imported.update(name.partition(".")[0] for name in _imported_names(code))
    needed |= imported
    if "notebook_launcher" in imported and "Accelerator" in names:
        needed.add(ACCELERATOR)
    if names & MAKE_OPTIMIZERS:
        needed.add(COMPILER)
    return [inner for used in _used_by(value, names) for inner in _inside(used)]


@functools.lru_cache(maxsize=256)
def _is_users(name: str) -> bool:
    """Return True for the notebook, and for a module that no package installs."""
    return name == "__main__" or ((module := sys.modules.get(name)) is not None and is_local(module))


def _inside(value: Any) -> Iterator[Any]:
    """Yield the function inside a method, or inside a partial function with its arguments; the items of a container."""
    if isinstance(value, functools.partial):
        yield from _inside(value.func)
        yield from (*value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield value.__self__
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, list | tuple):
        yield from value[:MAX_ITEMS]
    elif isinstance(value, dict):
        yield from list(value.values())[:MAX_ITEMS]
    else:
        yield value
        if not isinstance(value, types.FunctionType | types.ModuleType | type):
            yield type(value)  # For an instance of a class of the notebook: its methods.


def _imported_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the modules that the code imports."""
    high, instructions = 0, code.co_code
    for at in range(0, len(instructions), 2):
        operation, argument = instructions[at], instructions[at + 1] | high
        high = argument << 8 if operation == EXTENDED_ARG else 0
        if operation == IMPORT_NAME:
            yield code.co_names[argument]


def _used_by(function: types.FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield the variables that a function uses from outside; of a module of the user's, what the function may use."""
    unset = types.CellType()
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    found += [cell.cell_contents for cell in function.__closure__ or () if cell != unset]
    for value in found:
        if isinstance(value, types.ModuleType) and _is_users(value.__name__):
            yield from (inner for name, inner in vars(value).items() if name in names)
        else:
            yield value
