"""Objects that the other side finds by the path of an import, as a fork of the kernel would have them.

Modules, functions and classes travel by name in any case. So do here what a library keeps one of: instances of
subclasses of a module (`torch.backends.cudnn`, `torch.ops`), classes that go by another name than their own
(`torch.nn.attention.SDPBackend`), the one object of a class that cannot be copied, and its methods (`random.shuffle`).
"""

from __future__ import annotations

import copyreg
import importlib
import operator
import os
import sys
import types
from typing import Any, NamedTuple

from cloudpickle.cloudpickle import _is_registered_pickle_by_value as travels_by_value

from notebook_launcher.travel.kinds import MAIN

__all__ = ["ImportPath", "import_path", "kept_objects", "reduce_by_path"]

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

    Args:
        obj: The object.
        is_kept: It is among the `kept_objects` of its class.
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
