"""Registrations: classes and functions of the notebook that a cell has put into a registry of a library.

`AutoModel.register(MyConfig, MyModel)` leaves them in a dictionary of the library, which a rank lacks. They are found
from the definition outward, by who refers to it, until a module or a class of a library is reached. Each level takes a
walk of the garbage collector through all objects: 40 ms for 400,000. So a definition is looked for only after a cell
has given it to a library, and a walk ends where the notebook's own variables begin.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

from notebook_launcher.ipython_shell import FRONT_END
from notebook_launcher.travel.cell_code import Member, Overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from notebook_launcher.travel.cell_code import Step


MAX_LEVELS = 12
"""Levels between a definition and the library: in the store of Hydra they are 11."""
MAX_REFERRERS = 200
"""Objects of one level that are followed; what more objects refer to is no entry of a registry."""
NOT_REGISTRIES = frozenset(
    {"__main__", "__mp_main__", "notebook_launcher", "builtins", "sys", "gc", "typing", "abc", "weakref", "inspect"}
    | {"asyncio", "concurrent", "threading", "multiprocessing", "signal", "atexit", "unittest", "linecache"}
    | {"traceback", "cloudpickle", "pickle", "warnings", "types", "importlib", "enum", "dataclasses", "logging"}
    | {"contextlib", *FRONT_END}
)
"""Top-level modules that refer to the notebook's definitions for the running process, or to describe them."""
OPAQUE: tuple[type, ...] = (types.FrameType, types.GeneratorType, types.CoroutineType, types.TracebackType)
OPAQUE += (types.MethodType, types.BuiltinFunctionType, types.ModuleType)  # What a module has lies in its dictionary.
CONTAINERS = (dict, list, set, tuple, frozenset)
PARTS = (types.GetSetDescriptorType, types.MemberDescriptorType)
"""Objects that belong to a class or function itself."""


RegistryPath: TypeAlias = "tuple[str, tuple[Step, ...]]"
"""A module, and the steps from it: attributes, keys in tuples of their own, members."""
Way: TypeAlias = "Iterator[tuple[Any, str, tuple[Step, ...]]]"
"""Containers, each with its module and the steps from there to what it holds of the notebook."""


def top_level(name: str) -> str:
    """Return the name of the package of a module."""
    return name.partition(".")[0]


def find_registrations(definitions: Iterable[Any]) -> tuple[list[RegistryPath], list[Any]]:
    """Return the places in libraries that hold these classes and functions, or objects that hold them; and which do."""
    definitions = list(definitions)
    search = _Search(definitions)
    found: dict[tuple[int, str], RegistryPath] = {}
    # Objects of libraries may do anything when they are looked at. What is missed, a rank's error names.
    with contextlib.suppress(Exception):
        for _ in range(MAX_LEVELS):
            if not search.widen():
                break
        for container, module, steps in search.places():
            # One dictionary may be known in several modules: the first in the order of imports is its home.
            found.setdefault((id(container), repr(steps[-1])), (module, steps))
            search.note_reached(id(container))
    weak = [path for definition in definitions for path in search.weak_keys(definition)]
    reached = [definition for definition in definitions if id(definition) in search.reached]
    search.close()
    return [*found.values(), *weak], reached


class _Search:
    """A walk from definitions outward, level by level, and the way back."""

    def __init__(self, definitions: Iterable[Any]) -> None:
        self._objects: dict[int, Any] = {id(value): value for value in definitions}
        """All that was met, by id."""
        self._starts = frozenset(self._objects)
        self.reached: set[int] = set()
        """The definitions that libraries hold, by id."""
        self._inner: dict[int, list[int]] = {}
        """By object: what it refers to on the way to a definition."""
        self._num_outer: dict[int, int] = {}
        """By object: how many objects refer to it."""
        self._frontier = list(self._objects)
        self._roots: list[int] = []
        modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
        self._modules = {id(vars(module)): module for module in reversed(modules)}

    def weak_keys(self, definition: Any) -> Iterator[RegistryPath]:
        """Yield the places of a definition that is a key of a `WeakKeyDictionary`, which does not refer to it."""
        for reference in weakref.getweakrefs(definition):
            callback: Any = reference.__callback__
            if not getattr(callback, "__qualname__", "").startswith("WeakKeyDictionary."):
                continue
            dictionary = callback.__defaults__[0]()
            for holder in gc.get_referrers(dictionary):
                module = self._modules.get(id(holder))
                if module is not None and top_level(module.__name__) not in NOT_REGISTRIES:
                    self.reached.add(id(definition))
                    held = list(holder.items())
                    yield from ((module.__name__, (key, (definition,))) for key, value in held if value is dictionary)

    def note_reached(self, key: int) -> None:
        """Note the definitions to which an object leads."""
        pending, seen = [key], set[int]()
        while pending:
            key = pending.pop()
            pending += [inner for inner in self._inner.get(key, ()) if inner not in seen]
            seen.add(key)
        self.reached |= seen & self._starts

    def close(self) -> None:
        """Let go of all objects."""
        self._objects.clear()

    def widen(self) -> bool:
        """Take the next level; return False if there is none."""
        known = set(self._frontier)
        inner = [self._objects[key] for key in self._frontier]
        outer = gc.get_referrers(*inner)
        own = {id(inner), id(outer), id(self._objects)}
        self._frontier = []
        while outer:
            each = outer.pop()
            if id(each) in own or self._is_outside(each):
                continue
            below = {id(part) for part in gc.get_referents(each) if id(part) in known}
            below = {key for key in below if not _belongs_to(each, self._objects[key])}
            for key in below:
                self._num_outer[key] = self._num_outer.get(key, 0) + 1
            if id(each) in self._inner:
                self._inner[id(each)] += below  # Reached before, by a shorter way.
            if not below or id(each) in self._objects:
                continue
            self._inner[id(each)] = list(below)
            if id(each) in self._modules or _is_importable(each):
                self._roots.append(id(each))
            # 3: the variable, the argument and the notebook's name for the object, of which nobody else knows.
            elif (isinstance(each, type | types.FunctionType) and not _is_wrapper(each)) or (
                sys.getrefcount(each) <= 3 and id(each) in self._variables()
            ):
                continue
            else:
                self._frontier.append(id(each))
            self._objects[id(each)] = each
        del inner
        return 0 < len(self._frontier) <= MAX_REFERRERS

    def _variables(self) -> set[int]:
        return {id(value) for value in vars(sys.modules["__main__"]).values()}

    def _is_outside(self, value: Any) -> bool:
        """Return True for what is no part of a library: frames, and what belongs to the notebook or this package."""
        if isinstance(value, OPAQUE):
            return True
        if isinstance(value, type):  # Not by its metaclass, which is that of `abc` for many registries.
            return False
        module = self._modules.get(id(value))
        home = module.__name__ if module is not None else getattr(type(value), "__module__", "")
        return top_level(str(home)) in NOT_REGISTRIES - {"builtins"} or (module is not None and home == "builtins")

    def places(self) -> Way:
        """Yield containers, each with its module and the steps from there to what it holds of the notebook."""
        order = {name: at for at, name in enumerate(sys.modules)}
        named = []
        for key in self._roots:
            root, module = self._objects[key], self._modules.get(key)
            path = (module.__name__, ()) if module else (root.__module__, tuple(root.__qualname__.split(".")))
            named.append((order.get(path[0], 0), key, path))
        for _, key, (name, steps) in sorted(named, key=lambda each: each[:2]):
            yield from self._inside(key, name, steps, frozenset())

    def _inside(self, key: int, module: str, steps: tuple[Step, ...], way: frozenset[int]) -> Way:
        """Yield the places inside an object that is itself at a place."""
        holder = self._objects[key]
        for child in () if key in way else self._inner.get(key, ()):
            value = self._objects[child]
            for step in self._steps_between(holder, value, child):
                place = (*steps, step)
                if isinstance(step, Member | Overload):
                    yield holder, module, place
                elif child in self._starts or (isinstance(step, tuple) and _is_in_key(step[0], value)):
                    if isinstance(step, tuple):
                        yield holder, module, place
                else:
                    yield from self._further(holder, child, module, place, way | {key})
            if _is_namespace_of(value, holder) and not _is_dispatcher(holder):
                for below in self._inner.get(child, ()):
                    for name, part in list(value.items()):
                        if part is self._objects[below] and below not in self._starts:
                            yield from self._further(holder, below, module, (*steps, name), way | {key, child})

    def _further(self, holder: Any, child: int, module: str, place: tuple[Step, ...], way: frozenset[int]) -> Way:
        # An object around a definition of which nobody else knows was made for this registration, and travels whole.
        is_made_for_it = self._num_outer.get(child, 0) == 1 and type(self._objects[child]) not in CONTAINERS
        inside = [] if is_made_for_it and isinstance(place[-1], tuple) else self._inside(child, module, place, way)
        found = False
        for found_place in inside:
            found = True
            yield found_place
        if is_made_for_it and not found:
            yield holder, module, place

    def _steps_between(self, holder: Any, value: Any, child: int) -> Iterator[Step]:
        is_module = id(holder) in self._modules
        if _is_dispatcher(holder):
            yield from (Overload(cls) for cls, own in holder.registry.items() if id(own) in self._starts)
            return
        if isinstance(holder, list | set):
            if child in self._starts:
                yield Member(value)
        elif isinstance(holder, dict) and not is_module:
            for key, entry in list(dict.items(holder)):  # A library's own class of dictionaries may do anything here.
                if entry is value or _is_in_key(key, value):
                    yield (key,)
        if is_module:
            yield from (name for name, each in list(holder.items()) if each is value)
        elif type(holder) not in CONTAINERS:
            yield from _attributes(holder, value)


def _belongs_to(referrer: Any, value: Any) -> bool:
    """Return True if an object refers to a class or function as a part of it, or as the class of an instance."""
    if not isinstance(value, type | types.FunctionType):
        return False
    if isinstance(referrer, PARTS):
        return True
    if isinstance(referrer, tuple) and isinstance(value, type):
        first = referrer[0]
        return isinstance(first, type) and referrer in (first.__mro__, first.__bases__)
    return type(referrer) is value


def has_own_name(value: Any) -> bool:
    """Return True for a class or function that its module has under its name."""
    found: Any = sys.modules.get(value.__module__)
    for step in value.__qualname__.split("."):
        # Not by getattr: modules of transformers import a model when they are asked for a name.
        found = getattr(found, "__dict__", {}).get(step)
    return found is value


def _is_importable(value: Any) -> bool:
    """Return True for a class, or a function of `functools.singledispatch`, that its module has under its name."""
    is_one = isinstance(value, type) or _is_dispatcher(value)
    return is_one and top_level(value.__module__) not in NOT_REGISTRIES and has_own_name(value)


def _is_wrapper(value: type | types.FunctionType) -> bool:
    """Return True for a function that a library has made around another, such as OmegaConf's around a resolver."""
    if not isinstance(value, types.FunctionType) or value.__globals__ is vars(sys.modules["__main__"]):
        return False
    return bool(value.__code__.co_flags & inspect.CO_NESTED)  # functools.wraps copies all names.


def _is_dispatcher(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and "registry" in vars(value) and "dispatch" in vars(value)


def _is_in_key(key: Any, value: Any) -> bool:
    return key is value or (isinstance(key, tuple) and any(part is value for part in key))


def _is_namespace_of(value: Any, holder: Any) -> bool:
    """Return True for the dictionary of an object's or a class's attributes."""
    if isinstance(holder, type):
        return type(value) is dict and value.keys() == vars(holder).keys()
    return type(value) is dict and getattr(holder, "__dict__", None) is value


def _attributes(holder: Any, value: Any) -> Iterator[str]:
    yield from (name for name, each in list(getattr(holder, "__dict__", {}).items()) if each is value)
    for cls in type(holder).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    if member.__get__(holder) is value:
                        yield name
                except AttributeError:
                    continue
