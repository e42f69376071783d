"""Attributes of libraries that the notebook has replaced: ranks have them too, as forks of the kernel would.

After `F.gelu = mine` in a cell, ranks that import the module themselves would compute with the original, without a
word. In the kernel `ReplacedAttributes` finds what cells have changed, by their text and by a scan of all modules for
functions and classes of the notebook; `registrations.py` finds what they have put into registries. A rank's `Replacer`
sets it before the function is unpacked, and puts the originals back once the kernel has done so.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import dis
import functools
import gc
import inspect
import itertools
import operator
import sys
import types
import weakref
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from notebook_launcher.ipython_shell import FRONT_END, running_shell
from notebook_launcher.travel import cell_code, namespace
from notebook_launcher.travel.afterimport import after_import
from notebook_launcher.travel.cell_code import Attributes, Code, Contents, Member, Overload, Step, Store, Subclass
from notebook_launcher.travel.registrations import NOT_REGISTRIES, find_registrations, has_own_name, top_level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


MISSING = object()

NEVER = frozenset({"__main__", "__mp_main__", "sys", "notebook_launcher", *FRONT_END})
"""Top-level modules whose attributes stay in the kernel. Those of `sys` belong to the process."""
WRAPPERS = (functools.partial, property, staticmethod, classmethod, types.MethodType, _lru_cache_wrapper)
HARMLESS = frozenset(
    {"abc", "builtins", "contextlib", "dataclasses", "enum", "functools", "notebook_launcher", "numpy", "time"}
    | {"torch", "typing"}
)
"""Top-level modules whose functions keep nothing of what they are given in an attribute of a module."""


PLAIN = (bool, int, float, str, types.NoneType)
"""Types of settings; what else a function assigns may belong to the process."""
STRONG = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque)
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
REPEATED = frozenset(
    {("_codecs", "register"), ("_codecs", "register_error"), ("abc", "ABCMeta.register"), ("tqdm.std", "tqdm.pandas")}
)
"""Module and name of functions that keep what they are given where no search finds it, and that ranks may call, too."""
NOT_NAMED = frozenset({"atexit", "faulthandler", "signal", "unittest", "weakref"})
"""Top-level modules whose registrations belong to the process, or are found by a scan."""


class Place(NamedTuple):
    """An attribute, or an entry of a dictionary, from its module on."""

    module: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        keys = [f".{s}" if isinstance(s, str) else f"[{s[0]!r}]" if isinstance(s, tuple) else "" for s in self.steps]
        return self.module + "".join(keys)


class Replacement(NamedTuple):
    """A place with the value that it has in the kernel; `is_deleted` if it has none."""

    place: Place
    value: Any
    is_deleted: bool = False


class Call(NamedTuple):
    """A call of a cell that has registered something."""

    text: str
    at: int
    """Number of the code that has made it last."""
    names: frozenset[str]
    """Variables that the text uses."""
    is_repeated: bool
    """True if ranks make it, too; False if a line names it."""
    is_checked: bool = False
    """True if it is known that its arguments can travel, or if a line has named it."""


@functools.lru_cache(maxsize=1)
def replaced_attributes_of(_pid: int) -> ReplacedAttributes:
    """Return what the notebook of the process with this number has replaced."""
    return ReplacedAttributes()


class ReplacedAttributes:
    """What the notebook in this process has replaced, as far as its cells have run."""

    def __init__(self) -> None:
        self._assigned: dict[Place, bool] = {}
        """Places that cells have assigned; True if the code that did so was a deletion."""
        self._scanned: dict[Place, None] = {}
        """Places where a scan has found something of the notebook."""
        self.registered: dict[Place, None] = {}
        """Places in registries, where cells have put something of the notebook by calls."""
        self._calls: dict[str, Call] = {}
        """Calls that have registered what no search finds, by their text."""
        self._functions: dict[str, Code] = {}
        self._imports: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._num_read = 0
        """Number of sources that were read: 0 before the first look."""
        self.called: set[str] = set()
        """Last names of the functions that cells have called."""
        self._told: set[Place] = set()
        self.owners: list[Place] = []
        """Objects whose attributes cells have set by computed names."""
        self.has_unable = False
        """True if a value of the last look could not travel."""

    def read(self) -> None:
        """Read the code that has run since the last time."""
        sources = _sources()
        if sources is None or not self._num_read <= len(sources):
            self._num_read = 0  # There is no history, or it was reset.
        new = [cell_code.read_code(source) for source in (sources or [])[self._num_read :]]
        is_first = not self._num_read
        is_lambda_kept = functools.cache(_is_lambda_kept)
        may_have_replaced = [self._note(code, is_lambda_kept) for code in new]
        reached: list[Any] = []
        if given := [value for code in new for value in self._registered_by(code)]:
            places, reached = find_registrations(given)
            self.registered.update(dict.fromkeys(Place(*found) for found in places))
        if any(may_have_replaced) or (is_first and any(map(_is_notebooks, list(namespace.main_globals().values())))):
            self._scanned.update(dict.fromkeys(_scan()))
        for at, code in enumerate(new, self._num_read):
            self._note_calls(code, at, reached)
        self._num_read += len(new)

    def look(self) -> list[Replacement]:
        """Return the replacements that are in force; only code that has run since the last look is read."""
        self.read()
        found: dict[tuple[int, Step], Replacement] = {}
        for place, is_deleted in (*self._assigned.items(), *((place, False) for place in self._scanned)):
            owner = _owner(place)
            value = _value(owner, place.steps[-1])
            if owner is MISSING or _is_original(owner, place.steps[-1], value):
                continue
            if (value is not MISSING or is_deleted) if place in self._assigned else _is_notebooks(value):
                found.setdefault((id(owner), place.steps[-1]), Replacement(place, value, value is MISSING))
        for place in list(self.registered):
            owner = _owner(place)
            if (value := _value(owner, place.steps[-1])) is MISSING:
                del self.registered[place]
            else:
                found.setdefault((id(owner), place.steps[-1]), Replacement(place, value))
        return list(found.values())

    def repeated(self, can_travel: Callable[[Any], bool]) -> list[Call]:
        """Return the calls that ranks can make, too: those whose arguments can travel."""
        main = namespace.main_globals()
        for text, call in self._calls.items():
            if call.is_repeated and not call.is_checked:
                able = can_travel([main[name] for name in call.names if name in main])
                self._calls[text] = call._replace(is_repeated=able, is_checked=able)
        return [call for call in self._calls.values() if call.is_repeated]

    @property
    def lacking(self) -> list[str]:
        """The text of those calls that ranks cannot make."""
        return [call.text for call in self._calls.values() if not call.is_repeated]

    def untold_calls(self) -> list[str]:
        """Return the text of those calls that ranks cannot make, and that were not returned before."""
        new = [call.text for call in self._calls.values() if not (call.is_repeated or call.is_checked)]
        self._calls.update((text, self._calls[text]._replace(is_checked=True)) for text in new)
        return new

    def untold(self, places: Iterable[Place]) -> list[Place]:
        """Return those places that were not asked about before."""
        new = [place for place in places if place not in self._told]
        self._told.update(new)
        return new

    def assigned_in(self, module: str) -> set[object]:
        """Return the variables of a module that cells have assigned, in whole or in part."""
        return {place.steps[0] for place in self._assigned if place.module == module}

    def _note(self, code: Code, is_lambda_kept: Callable[[], bool]) -> bool:
        """Note the places that code has assigned; return True if it may have changed others, too."""
        self._functions.update(code.functions)
        self._imports.update(code.imports)
        may_replace = False
        for part in code.executed(self._functions):
            self.called |= part.calls
            for store in part.stores:
                if (place := self._place_of(store, part.imports)) is not None:
                    if isinstance(place.steps[-1], Attributes):
                        self._note_attributes(place)
                        continue
                    if isinstance(place.steps[-1], Contents) and top_level(place.module) in NOT_REGISTRIES:
                        continue
                    self._assigned[place] = store.is_deleted
                    # A loop may have assigned others by the same text, unless the name is that of an import.
                    may_replace |= store.root not in part.imports and store.root not in self._imports
            may_replace |= any(_may_keep(root, given, is_lambda_kept) for root, given in part.handed)
            for root, steps in part.setters:
                if (place := self._place_of(Store(root, steps), part.imports)) is not None:
                    self._assigned.update(dict.fromkeys(_set_by(_value(_owner(place), place.steps[-1])), False))
        return may_replace

    def _note_attributes(self, place: Place) -> None:
        """Note all public attributes of an owner that are plain values; the line names the owner."""
        owner = _owner(place)
        names = [name for name, value in getattr(owner, "__dict__", {}).items() if isinstance(value, PLAIN)]
        places = [Place(place.module, (*place.steps[:-1], name)) for name in names if not name.startswith("_")]
        self._assigned.update(dict.fromkeys(places, False))
        self._told.update(places)
        self.owners.append(Place(place.module, place.steps[:-1]))

    def _note_calls(self, code: Code, at: int, reached: Iterable[Any]) -> None:
        """Note the calls in code that register something, unless a search or scan has reached what they were given."""
        scanned = (_value(_owner(place), place.steps[-1]) for place in self._scanned)
        known = {getattr(each, "__name__", "") for each in (*reached, *scanned)}
        known |= {name for name, value in namespace.main_globals().items() if any(value is each for each in reached)}
        done = {id(part) for inner in code.everywhere for part in inner.executed(self._functions)}
        for part in code.executed(self._functions):
            for each in () if id(part) in done else part.registrations:
                if (is_repeated := self._is_repeated(each, part, known)) is not None:
                    self._calls[each.text] = Call(
                        each.text, at, frozenset(filter(str.isidentifier, each.given)), is_repeated
                    )

    def _is_repeated(self, call: cell_code.Registration, code: Code, known: set[str]) -> bool | None:
        """Return True for a call that ranks can make, too; False for one that is to be named; None for others."""
        main, (root, steps, _) = namespace.main_globals(), call.called
        if main.get(root) is sys and steps:
            return False
        place = self._place_of(call.called, code.imports)
        if place is None:
            return None
        owner, name = _owner(place), place.steps[-1]
        function = inspect.getattr_static(owner, str(name), None)
        function = getattr(function, "__func__", function)
        if (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")) in REPEATED:
            names = filter(str.isidentifier, call.given)
            is_known = all(each in main or hasattr(builtins, each) for each in names)
            return call.is_repeatable and is_known
        is_of_torch = place.module == "torch.library"
        if (name in cell_code.OF_TORCH and not is_of_torch) or name == "pandas" or top_level(place.module) in NOT_NAMED:
            return None
        if is_of_torch and str(name).startswith("register_") and "custom_op" in self.called:
            return None
        return None if known & {_given_name(each) for each in call.given} else False

    def _registered_by(self, code: Code) -> list[Any]:
        """Return the notebook's definitions that code gives to what may register them."""
        main = namespace.main_globals()
        given: dict[str, None] = {}
        objects: set[str] = set()
        """Names of all that is given to what registers something."""
        hidden: set[str] = set()
        """Names of definitions that the notebook does not have under their names."""
        for part in code.executed(self._functions):
            registers = any("register" in name for name in part.calls)
            given.update(
                (name, None)
                for root, name in part.handed
                if (_is_kept(name) if registers else name != cell_code.ANYTHING and _may_keep(root, name))
            )
            if registers:
                hidden |= {_hidden_name(name) for _, name in part.handed}
            given.update((name, None) for each in part.registrations for name in each.given)
            given.update((name, None) for name in part.derived if _is_noted_by_base(main.get(name)))
            for name in part.derived:
                self.registered.update(dict.fromkeys(_listed_subclass(main.get(name))))
            objects |= {
                name for each in part.registrations for name in each.given if self._place_of(each.called, part.imports)
            }
        found = [main[name] for name in given if isinstance(main.get(name), type | types.FunctionType)]
        found += [main[name] for name in sorted(objects) if _is_searched_for(main.get(name))]
        if hidden := hidden - {""}:
            found += [each for each in gc.get_objects() if _is_definition(each) and each.__name__ in hidden]
        return found

    def _place_of(self, store: Store, imports: dict[str, tuple[str, tuple[str, ...]]]) -> Place | None:
        module, steps = _path_of(
            namespace.main_globals().get(store.root), imports.get(store.root) or self._imports.get(store.root)
        )
        steps = (*steps, *store.steps)
        if module is None or not steps:
            return None
        # From the innermost module on: a rank sets the attribute once that module is imported.
        while len(steps) > 1 and f"{module}.{steps[0]}" in sys.modules:
            module, steps = f"{module}.{steps[0]}", steps[1:]
        if top_level(module) in NEVER or (module, steps[0]) == ("os", "environ"):
            return None
        return Place(module, steps)


def _sources() -> list[str] | None:
    """Return the code that the notebook or script has run so far; None if nothing keeps it."""
    shell = running_shell()
    if shell is not None:
        history: list[str] = shell.history_manager.input_hist_parsed
        return history
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return [_read_script(str(getattr(sys.modules["__main__"], "__file__", None)))]
    return None


@functools.lru_cache(maxsize=1)
def _read_script(file: str) -> str:
    # Once: it is read for each call, and the script that runs is the one that was there at its start.
    return Path(file).read_text(encoding="utf-8")


def _path_of(root: object, imported: tuple[str, tuple[str, ...]] | None) -> tuple[str | None, tuple[Step, ...]]:
    """Return module and attributes by which a name of the notebook is found elsewhere; (None, ()) if it is its own.

    `root` is the value of the name, `imported` module and attribute of its import, if there was one.
    """
    if isinstance(root, types.ModuleType) and sys.modules.get(root.__name__) is root:
        return root.__name__, ()
    if imported is not None:
        module, steps = imported
        value: object = sys.modules.get(module, MISSING)
        for step in steps:
            value = _value(value, step)
        if value is not MISSING and (root is None or value is root):
            inner = ".".join((module, *steps))
            return (inner, ()) if inner in sys.modules else (module, steps)
    if isinstance(root, type) and root.__module__ != "__main__":
        return _own_place(root) or (None, ())
    return None, ()


def _own_place(cls: type) -> Place | None:
    """Return the place of a class under its own name; None if it is not there."""
    return Place(cls.__module__, tuple(cls.__qualname__.split("."))) if has_own_name(cls) else None


def _owner(place: Place) -> Any:
    """Return the object that has the attribute or entry; MISSING if there is none."""
    owner: Any = sys.modules.get(place.module, MISSING)
    for step in place.steps[:-1]:
        value = _value(owner, step)
        if value is MISSING and isinstance(owner, type):
            value = getattr(owner, str(step), MISSING)  # Inherited.
        owner = value
    return owner


def _value(owner: Any, step: Step) -> Any:  # noqa: C901, PLR0911 - a table
    """Return an attribute or entry as its owner holds it, and MISSING if it has none. Imports nothing."""
    if owner is MISSING:
        return MISSING
    if isinstance(step, Contents):
        return _contents(owner)
    if isinstance(step, Member):
        return step.value if any(each is step.value for each in owner) else MISSING
    if isinstance(step, Subclass):
        return step.cls if step.cls in type.__subclasses__(owner) else MISSING
    if isinstance(step, Overload):
        return owner.registry.get(step.cls, MISSING)
    if isinstance(step, tuple):
        try:
            return owner[step[0]]
        except Exception:  # a container of the user's may raise anything
            return MISSING
    attributes = getattr(owner, "__dict__", {})
    if step in attributes or isinstance(owner, type):
        return attributes.get(step, MISSING)
    if type(owner) is types.ModuleType:  # Its `__getattr__` may import another one.
        return sys.modules.get(f"{owner.__name__}.{step}", MISSING)
    try:
        return getattr(owner, cast("str", step), MISSING)
    except Exception:  # a property may raise anything
        return MISSING


def _contents(owner: Any) -> Any:
    """Return what a dictionary, list or set of the standard library holds, in a plain one; MISSING for all else."""
    if type(owner) not in (*STRONG, *WEAK):
        return MISSING
    if hasattr(owner, "items"):
        return dict(owner)
    return list(owner) if hasattr(owner, "extend") else set(owner)


def _is_original(owner: Any, step: Step, value: Any) -> bool:
    """Return True for a function or class of a library under its own name."""
    if not isinstance(value, types.FunctionType | type) or _is_notebooks(value):
        return False
    inner = f"{owner.__qualname__}.{step}" if isinstance(owner, type) else step
    module = owner.__module__ if isinstance(owner, type) else getattr(owner, "__name__", None)
    return (value.__module__, value.__qualname__) == (module, inner)


def _is_notebooks(value: Any) -> bool:  # noqa: PLR0911 - a table
    """Return True for a function or class of the notebook, and for what the standard library wraps around one."""
    match value:
        case types.FunctionType():
            # Not by its `__module__`: functools.wraps gives it that of the original.
            return value.__globals__ is namespace.main_globals()
        case type():
            return value.__module__ == "__main__"
        case functools.partial():
            return _is_notebooks(value.func)
        case staticmethod() | classmethod() | types.MethodType():
            return _is_notebooks(value.__func__)
        case property():
            return any(map(_is_notebooks, (value.fget, value.fset, value.fdel)))
        case _lru_cache_wrapper():
            return _is_notebooks(value.__wrapped__)
        case _:
            return False


def _set_by(function: Any) -> Iterator[Place]:
    """Yield the variables of its module that a library's function assigns, with numbers, texts and the like."""
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, types.FunctionType):
        return
    module, code = function.__globals__, function.__code__
    home = str(module.get("__name__"))
    if top_level(home) not in NEVER | HARMLESS:
        names = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"}
        yield from (Place(home, (name,)) for name in sorted(names) if isinstance(module.get(name), PLAIN))


def _is_definition(value: Any) -> bool:
    # Not by isinstance, which asks a proxy for its `__class__`: torch's `reduce_op` then warns.
    return issubclass(type(value), type | types.FunctionType) and _is_notebooks(value)


def _is_searched_for(value: Any) -> bool:
    """Return True for an object of a class, unless it is a module, a definition or a plain container."""
    kind = type(value)
    is_definition = issubclass(kind, type | types.FunctionType | types.ModuleType | types.BuiltinFunctionType)
    return not is_definition and kind.__module__ != "builtins" and gc.is_tracked(value)


def _given_name(given: str) -> str:
    """Return the own name of a definition that a call was given."""
    value: Any = namespace.main_globals().get(given)
    return str(value.__name__) if _is_definition(value) else _hidden_name(given) or given


def _is_noted_by_base(cls: Any) -> bool:
    """Return True for a class of the notebook that a base of a library may have registered as it was made."""
    if not _is_definition(cls) or not isinstance(cls, type):
        return False
    noting = [type(cls), *(base for base in cls.__mro__ if "__init_subclass__" in vars(base))]
    return any(top_level(each.__module__) not in HARMLESS | NOT_REGISTRIES for each in noting)


def _listed_subclass(cls: Any) -> Iterator[Place]:
    """Yield the place of a class of the notebook below a library's one whose module asks for `__subclasses__()`."""
    for base in cls.__bases__ if _is_definition(cls) and isinstance(cls, type) else ():
        is_library = top_level(base.__module__) not in HARMLESS | NOT_REGISTRIES
        if is_library and (place := _own_place(base)) is not None and _lists_subclasses(base.__module__):
            yield Place(place.module, (*place.steps, Subclass(cls)))


@functools.lru_cache(maxsize=256)
def _lists_subclasses(module: str) -> bool:
    values = list(vars(sys.modules[module]).values())
    values += [each for value in values if isinstance(value, type) for each in vars(value).values()]
    functions = [getattr(value, "__func__", value) for value in values]
    return any("__subclasses__" in each.__code__.co_names for each in functions if type(each) is types.FunctionType)


def _hidden_name(given: str) -> str:
    """Return the own name of a lambda, or of a definition whose name a decorator has taken; empty for others."""
    if given == cell_code.ANYTHING:
        return "<lambda>"
    name = given.removeprefix(cell_code.DECORATED)
    return name if name != given and not _is_definition(namespace.main_globals().get(name)) else ""


def _may_keep(root: str, given: str, is_lambda_kept: Callable[[], bool] = lambda: True) -> bool:
    """Return True if a call may have put something of the notebook into a module.

    Args:
        root: First name of what is called.
        given: Name of an argument, or ANYTHING.
        is_lambda_kept: Tells whether any lambda of the notebook lives that is no variable of it.
    """
    main = namespace.main_globals()
    called = main.get(root, getattr(builtins, root, None))
    if any(called is each for each in (setattr, delattr, exec, eval)):  # Not `in`: a table has an `==` of its own.
        return True
    of = called if isinstance(called, type | types.FunctionType | types.BuiltinFunctionType) else type(called)
    module = called.__name__ if isinstance(called, types.ModuleType) else getattr(of, "__module__", None)
    if root != cell_code.ASSIGNED and top_level(str(module)) in HARMLESS:
        return False
    if given.startswith(cell_code.DECORATED):
        return _hidden_name(given) != ""
    return is_lambda_kept() if given == cell_code.ANYTHING else _is_notebooks(main.get(given)) and _is_kept(given)


def _is_kept(name: str) -> bool:
    """Return False for a function of the notebook to which nothing but the notebook's variables refers.

    After `table.apply(f)` nobody has kept `f`: to count references takes 20 µs, a scan or a search 200 ms. To a class
    refer its own parts and instances, too, so that the number tells nothing.
    """
    main = namespace.main_globals()
    value = main.get(name)
    if type(value) is not types.FunctionType:
        return True
    num_variables = sum(map(operator.is_, list(main.values()), itertools.repeat(value)))
    is_weakly_kept = weakref.getweakrefcount(value) > 0
    del value
    return is_weakly_kept or _num_references(main, name) > num_variables


def _num_references(owner: dict[str, Any], name: str) -> int:
    return sys.getrefcount(owner[name]) - _EXTRA_REFERENCES


_EXTRA_REFERENCES = 0
"""What `sys.getrefcount` counts too many: by one, but not in all versions of Python."""
_EXTRA_REFERENCES = _num_references({"": lambda: None}, "") - 1


def _is_lambda_kept() -> bool:
    """Return True if there is a lambda, or a function from inside another, beside the notebook's variables; 50 ms."""
    main = namespace.main_globals()
    variables = set(map(id, list(main.values())))
    return any(
        type(each) is types.FunctionType
        and (each.__name__ == "<lambda>" or each.__code__.co_flags & inspect.CO_NESTED)
        and id(each) not in variables
        for each in gc.get_referrers(main)
    )


def _scan() -> list[Place]:
    """Return the places in all loaded modules, and in their classes, that hold functions or classes of the notebook.

    It takes 160 ms of processor time for 3,760 modules with 310,000 attributes, measured beside other work.
    """
    scan = _Scan()
    for name, module in list(sys.modules.items()):
        if top_level(name) not in NEVER and isinstance(attributes := getattr(module, "__dict__", None), dict):
            scan.look(name, (), attributes)
    seen = 0
    while seen < len(scan.classes):  # Classes inside of classes are added meanwhile.
        for cls, place in list(scan.classes.items())[seen:]:
            seen += 1
            scan.look(*(_own_place(cls) or place), cls.__dict__)
    return scan.found


class _Scan:
    def __init__(self) -> None:
        self.found: list[Place] = []
        self.classes: dict[type, Place] = {}
        self._main = namespace.main_globals()
        self._is_looked_at: dict[type, bool] = dict.fromkeys(WRAPPERS, True)

    def look(self, module: str, steps: tuple[Step, ...], attributes: Mapping[str, Any]) -> None:
        main, kinds = self._main, self._is_looked_at
        for name, value in list(attributes.items()):
            kind = type(value)
            if kind is types.FunctionType:  # Most of them are: no call for these.
                if value.__globals__ is main:
                    self.found.append(Place(module, (*steps, name)))
                continue
            is_looked_at = kinds.get(kind)
            if is_looked_at is None:
                is_looked_at = kinds[kind] = issubclass(kind, type)
            if not is_looked_at:
                continue
            if _is_notebooks(value):
                self.found.append(Place(module, (*steps, name)))
            elif isinstance(value, type) and value not in self.classes:
                self.classes[value] = Place(module, (*steps, name))


class Replacer:
    """Sets in a rank what the notebook has replaced, and puts back what was there before."""

    def __init__(self) -> None:
        self._before: dict[Place, tuple[Any, Any]] = {}
        """What was there before, and the object that has the attribute."""
        self._wanted: dict[str, list[Replacement]] = {}
        """By module."""
        self._awaited: set[str] = set()
        """Modules that are not imported yet."""

    def put_back(self, *, except_for: Sequence[Place]) -> None:
        """Put back what was at the other places before."""
        kept = frozenset(except_for)
        for place in [place for place in self._before if place not in kept]:
            owner, value = self._before.pop(place)
            _set(owner, place.steps[-1], value)
        self._wanted.clear()

    def replace(self, replacements: Iterable[Replacement]) -> None:
        """Set these values, in modules that are not imported yet as soon as they are."""
        for replacement in replacements:
            self._wanted.setdefault(replacement.place.module, []).append(replacement)
        for name in self._wanted:
            if name in sys.modules:
                self._apply(name)
            elif name not in self._awaited:
                self._awaited.add(name)
                after_import({name: lambda module: self._apply(module.__name__)})

    def _apply(self, module: str) -> None:
        self._awaited.discard(module)
        for place, value, is_deleted in self._wanted.get(module, ()):
            owner = _owner(place)
            if owner is MISSING:
                owner = _new_group(place)
            if owner is MISSING:
                continue
            if place not in self._before or self._before[place][0] is not owner:
                before = _value(owner, place.steps[-1])
                self._before[place] = owner, before
                namespace.note_original(before)
            _set(owner, place.steps[-1], MISSING if is_deleted else value)


def _new_group(place: Place) -> Any:
    """Make the dictionary that a place needs inside a registry of groups; MISSING if it is something else."""
    if len(place.steps) > 1 and isinstance(key := place.steps[-2], tuple):
        outer = _owner(Place(place.module, place.steps[:-1]))
        if isinstance(outer, dict):
            return outer.setdefault(key[0], {})
    return MISSING


def _set(owner: Any, step: Step, value: Any) -> None:
    # An object that refuses the value, such as a frozen one, is left as it is: the kernel's refused it, too.
    with contextlib.suppress(Exception):
        match step:
            case str() if value is MISSING:
                delattr(owner, step)
            case str():
                setattr(owner, step, value)
            case Contents():
                owner.clear()
                (owner.extend if hasattr(owner, "extend") else owner.update)(value)
            case (key,) if value is MISSING:
                del owner[key]
            case (key,):
                owner[key] = value
            case Member(item) if value is MISSING:
                owner.remove(item)
            case Member(item) if all(each is not item for each in owner):
                owner.append(item) if isinstance(owner, list) else owner.add(item)
            case Overload(cls) if value is not MISSING:
                owner.register(cls, value)
