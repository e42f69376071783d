"""One `__main__` on both sides: how the notebook's own functions and classes keep their identity.

In a rank they are installed in its `__main__`, whose globals they use: `global` counters are shared, and `pickle` finds
the user's classes by name. A later call of a session brings the kernel's present values of the globals that it
uses; names whose values were the ranks' own are then reported. On the way back a definition that came from the kernel
is a reference to it, so that `isinstance` and `except` hold: to a class by cloudpickle's id, to a function by its name.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import importlib
import operator
import os
import pickle
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

# cloudpickle's own book of classes: it lets a class that returns be the class that left.
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS as IDS_OF_CLASSES
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as CLASSES_BY_ID
from cloudpickle.cloudpickle import _get_or_create_tracker_id as class_id_of
from cloudpickle.cloudpickle import _is_registered_pickle_by_value as travels_by_value

from notebook_launcher.travel import cells
from notebook_launcher.travel.kinds import MAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from notebook_launcher.travel.settings import SetupStep


# Where a rank's `__main__` keeps what it knows of the kernel's: the book goes with the namespace.
BOOK_NAME = "__notebook_launcher_arrivals__"


def main_globals() -> dict[str, Any]:
    """Return the namespace of this process's `__main__`."""
    return sys.modules["__main__"].__dict__


class _MainGlobals:
    """Stands in for the kernel's namespace in a pickle; arrives as the rank's namespace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return main_globals, ()


MAIN_GLOBALS = _MainGlobals()


@dataclasses.dataclass(slots=True)
class _Book:
    """Record of the definitions that a rank received from the kernel."""

    names: set[str] = dataclasses.field(default_factory=set)
    class_ids: weakref.WeakKeyDictionary[type, str] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    value_ids: dict[str, int] = dataclasses.field(default_factory=dict)
    """By name, the `id` of what arrived: a reference would keep alive what the ranks have dropped."""
    reported: set[str] = dataclasses.field(default_factory=set)
    """The overwritten names that were reported to the user."""
    originals: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)
    """Functions and classes of libraries in whose places the rank has something of the notebook, by their own names."""


class Definitions:
    """The notebook's definitions that go with a call: names for the rank's `__main__`, ids of classes, source lines."""

    def __init__(self) -> None:
        self._definitions: dict[int, Any] = {}

    def add(self, definition: Any) -> None:
        """Add a function or class that travels by value."""
        self._definitions[id(definition)] = definition

    def pack(self, can_travel: Callable[[Any], bool]) -> tuple[Any, ...]:
        """Return plain data and the definitions, for the pickler that added them to pickle.

        A nested class is found through the outer class, which is included if `can_travel` is true of it.
        """
        definitions = list(self._definitions.values())
        namespace = main_globals()
        names = {}
        for definition in definitions:
            qualname = getattr(definition, "__qualname__", "")
            name, _, path = qualname.partition(".")
            if definition.__module__ not in MAIN or _by_name(qualname) is not definition:
                continue
            if not path or (name not in names and isinstance(definition, type) and can_travel(namespace[name])):
                names[name] = namespace[name]
        class_ids = [
            (definition, class_id_of(definition)) for definition in definitions if isinstance(definition, type)
        ]
        files = {d.__code__.co_filename for d in definitions if isinstance(d, types.FunctionType)}
        return names, class_ids, cells.pack_cells(files)


def overwritten_since(before: Mapping[str, Any]) -> list[str]:
    """Return the names whose values in the rank were its own and were overwritten by a call; each is returned once.

    `before` is the namespace before the call was unpacked.
    """
    namespace, book = main_globals(), _book()
    arrived = {
        name: value
        for name, value in namespace.items()
        # A function that uses `__name__` brings that name along. The book has such a name too.
        if not (name.startswith("__") and name.endswith("__")) and (name not in before or before[name] is not value)
    }
    lost = {
        name
        for name in arrived.keys() & before.keys()
        if book.value_ids.get(name) != id(before[name]) and name not in book.reported
    }
    book.value_ids.update((name, id(value)) for name, value in arrived.items())
    book.reported |= lost
    return sorted(lost)


def note_inherited() -> None:
    """Record everything in `__main__` as received from the kernel, because this process was forked from the kernel."""
    names = {name: id(value) for name, value in main_globals().items()}
    book = _book()
    book.names.update(names)
    book.value_ids.update(names)


@contextlib.contextmanager
def noting_names_of(step: SetupStep) -> Iterator[None]:
    """Record what a step that runs in this rank sets in `__main__`: the kernel's own code does it, not an earlier run.

    What the same code has made in the kernel is one definition on both sides: it travels by its name.
    """
    before = dict(main_globals())
    yield
    book = _book()
    book.value_ids.update((n, id(v)) for n, v in main_globals().items() if n not in before or before[n] is not v)
    book.names.update(step.shared or ())


class SharedNames:
    """Finds definitions of the kernel that the ranks have of their own, by the steps before the call that make them."""

    def __init__(self, steps: Iterable[SetupStep]) -> None:
        self._values = {name: value for step in steps for name, value in (step.shared or {}).items()}
        self._names = {id(value): name for name, value in self._values.items()}

    def reference_to(self, value: Any) -> tuple[Any, ...] | None:
        """Return a reduction that finds the rank's own; None if the ranks have none."""
        if (name := self._names.get(id(value))) is not None:
            return _rank_own, (name,)
        qualname = getattr(value, "__qualname__", "") if isinstance(value, type) else ""
        if qualname.partition(".")[0] in self._values and _by_name(qualname) is value:  # A class inside a class.
            return _rank_own, (qualname,)
        return None


def _rank_own(qualname: str) -> Any:
    found = _by_name(qualname)
    if found is None:
        raise LookupError(
            f"the %%everywhere cell that makes {qualname} has not made it on this rank. Does the cell make it on every "
            "machine and in every process?"
        )
    return found


def _book() -> _Book:
    book: _Book = main_globals().setdefault(BOOK_NAME, _Book())
    return book


def unpack_definitions(definitions: tuple[Any, ...]) -> None:
    """Install the definitions that came with a call in this process."""
    names, class_ids, sources = definitions
    cells.keep_lines(sources)
    main_globals().update(names)
    sys.modules["__mp_main__"] = sys.modules["__main__"]  # the same module, as multiprocessing has it
    book = _book()
    book.names.update(names)
    book.class_ids.update(class_ids)


def note_original(value: Any) -> None:
    """Note what is about to be replaced in this rank, so that the notebook's references to it still find it."""
    if isinstance(value, types.FunctionType | type):
        _book().originals[value.__module__, value.__qualname__] = value


def reference_to_original(definition: Any) -> tuple[Any, ...] | None:
    """Return a reduction for a library's function or class that is not found by its name, because it was replaced."""
    module = sys.modules.get(str(definition.__module__))
    if module is None or definition.__module__ == "__main__" or "<locals>" in definition.__qualname__:
        return None
    if isinstance(definition, types.FunctionType) and definition.__globals__ is not module.__dict__:
        return None  # It only has the name of another one, by functools.wraps.
    found: Any = module
    for step in definition.__qualname__.split("."):
        if not hasattr(found, step):
            return None  # Something that a function of the module has made, such as a method of a named tuple.
        found = getattr(found, step)
    return None if found is definition else (_original, (module.__name__, definition.__qualname__))


def _original(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    if (module, qualname) in _book().originals:
        return _book().originals[module, qualname]
    for step in qualname.split("."):
        found = getattr(found, step)
    return found


def reference_to(definition: Any) -> tuple[Any, ...] | None:
    """Return a reduction that finds a function or class in the kernel; None if it did not come from the kernel."""
    book: _Book | None = main_globals().get(BOOK_NAME)
    if isinstance(definition, type) and book and definition in book.class_ids:
        return _at_home, ("class", definition.__qualname__, book.class_ids[definition])
    name = getattr(definition, "__qualname__", "")
    if definition.__module__ not in MAIN or _by_name(name) is not definition:
        return None
    if book and name.partition(".")[0] not in book.names:
        return None
    if isinstance(definition, type):
        return _at_home, ("class", name, IDS_OF_CLASSES.get(definition))
    return _at_home, ("function", name)


def _by_name(qualname: str) -> Any:
    found: Any = main_globals().get(qualname.partition(".")[0])
    for part in qualname.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def _at_home(kind: str, qualname: str, class_id: str | None = None) -> Any:
    found = CLASSES_BY_ID.get(class_id) or _by_name(qualname)
    if found is None:
        raise LookupError(f"the {kind} {qualname} is no longer defined in the notebook")
    return found


def _home_class(class_id: str | None, qualname: str) -> Any:
    # Values in folders that 0.3.0 has kept name this function and the next.
    return _at_home("class", qualname, class_id)


def _home_function(qualname: str) -> Any:
    return _at_home("function", qualname)


class KnownClassesUnpickler(pickle.Unpickler):
    """Takes a class that this process knows by its id as it is.

    cloudpickle first makes another one, which nobody uses; but its base finds it by `__subclasses__()`, and has been
    told of it by `__init_subclass__`.
    """

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a global, with cloudpickle's makers of classes guarded."""
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle" and name in {"_make_skeleton_class", "_make_skeleton_enum"}:
            return functools.partial(self._make_class, found)
        return found

    def _make_class(self, make: Callable[..., type], *args: Any) -> type:
        *_, class_id, _ = args
        known: type | None = CLASSES_BY_ID.get(class_id)
        return make(*args) if known is None else known


class HomeUnpickler(KnownClassesUnpickler):
    """Unpickles in the kernel, and leaves every class that the kernel already has as it is.

    A class that arrives by value under an id that the kernel knows is the kernel's class, and
    cloudpickle would write the rank's attributes over it.
    """

    def __init__(self, file: Any, *, buffers: Iterable[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._kept: set[type] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a global, with cloudpickle's makers and setters of classes guarded."""
        found = super().find_class(module, name)
        if (module, name) == ("cloudpickle.cloudpickle", "_class_setstate"):
            return functools.partial(self._set_class_state, found)
        return found

    def _make_class(self, make: Callable[..., type], *args: Any) -> type:
        known = CLASSES_BY_ID.get(args[-2])
        if known is not None:
            self._kept.add(known)
        return super()._make_class(make, *args)

    def _set_class_state(self, set_state: Callable[..., type], cls: type, state: Any) -> type:
        return cls if cls in self._kept else set_state(cls, state)


# --------------------------------------------------------------------------------------------------------------------
# Objects that the other side finds by the path of an import, as a fork of the kernel would have them.
#
# Modules, functions and classes travel by name in any case. So do here what a library keeps one of: instances of
# subclasses of a module (`torch.backends.cudnn`, `torch.ops`), classes that go by another name than their own
# (`torch.nn.attention.SDPBackend`), the one object of a class that cannot be copied, and its methods
# (`random.shuffle`).


METHODS = (types.MethodType, types.BuiltinMethodType)
NEW_OBJECT = getattr(copyreg, "__newobj__")  # noqa: B009 - type checkers do not know it
HEAP_TYPE = 1 << 9
"""The flag of a class that was made while the program ran, which the interpreter's own classes lack."""


class ImportPath(NamedTuple):
    """A module that can be imported, and the attributes that lead from it to an object."""

    module: str
    attributes: str = ""

    def __str__(self) -> str:
        """Return the path as a user would type it."""
        return f"{self.module}.{self.attributes}" if self.attributes else self.module

    def find(self) -> Any:
        """Return the object; raises what the import or an attribute raises."""
        module = importlib.import_module(self.module)
        return operator.attrgetter(self.attributes)(module) if self.attributes else module


def import_path(obj: Any) -> ImportPath | None:
    """Return the path of an object that a library keeps; None if what the object says of itself does not lead to it."""
    try:
        if isinstance(obj, types.ModuleType):
            return _by_full_name(obj, obj.__name__)
        if type(obj).__module__ == "torch._ops":
            name = getattr(obj, "_qualified_op_name", None) or obj._name  # noqa: SLF001 - an operator has no public one
            return _by_full_name(obj, "torch.ops." + name.replace("::", "."))
        return _among_globals(obj, _home(obj))
    except Exception:  # attributes of foreign objects may raise anything
        return None


def kept_objects(cls: type) -> set[int]:
    """Return the ids of the objects of this class that its own module has as globals."""
    module = sys.modules.get(str(cls.__module__))
    if module is None or cls.__module__ in MAIN:
        return set()
    return {id(value) for value in list(vars(module).values()) if type(value) is cls}


def reduce_by_path(obj: Any, *, is_kept: bool) -> tuple[Any, ...] | None:
    """Return a reduction by import path; None for an object that has none, or of which a copy serves as well.

    `is_kept` tells if it is among the `kept_objects` of its class.
    """
    cls = type(obj)
    if cls is types.ModuleType or not (
        isinstance(obj, types.ModuleType)
        or cls in METHODS
        or cls.__module__ == "torch._ops"
        or (is_kept and (obj is os.environ or not _can_be_copied(obj)))
    ):
        return None
    path = import_path(obj)
    return None if path is None else (ImportPath.find, (path,))


def _home(obj: Any) -> str:
    """Return the name of the module that should have an object."""
    if isinstance(obj, (type, types.FunctionType)):
        return obj.__module__
    if type(obj) not in METHODS:
        return type(obj).__module__
    # Extensions name the module of their functions, and the functions' object is not a module.
    holder = obj.__self__ if isinstance(obj.__self__, type) else type(obj.__self__)
    return holder.__module__ if getattr(obj, "__module__", None) is None else obj.__module__


def _by_full_name(obj: Any, name: str) -> ImportPath | None:
    """Return the path with this name if it leads to the object."""
    module, attributes = name, ""
    while module and module not in sys.modules:
        module, _, last = module.rpartition(".")
        attributes = f"{last}.{attributes}".rstrip(".")
    path = ImportPath(module, attributes)
    return path if module and module not in MAIN and path.find() is obj else None


def _among_globals(obj: Any, module: str) -> ImportPath | None:
    if module in MAIN or travels_by_value(sys.modules[module]):
        return None
    held = vars(sys.modules[module])
    if held.get(name := getattr(obj, "__name__", "")) is obj:
        return ImportPath(module, name)
    return next((ImportPath(module, name) for name, value in list(held.items()) if value is obj), None)


def _can_be_copied(obj: Any) -> bool:
    """Return False if pickle refuses an object, or if a copy could only be told from it by its identity."""
    cls = type(obj)
    if not cls.__flags__ & HEAP_TYPE and getattr(sys.modules[cls.__module__], cls.__name__, None) is not cls:
        return False  # `sys.version_info` goes by the name of its class
    try:
        reduced = obj.__reduce_ex__(5)
    except Exception:  # foreign objects may raise anything
        return False
    make, args, state, *_ = [*reduced, None] if isinstance(reduced, tuple) else (None, (), reduced)
    return not (make is NEW_OBJECT and args == (cls,) and state is None)
