"""Reductions for objects that notebooks define and that cloudpickle 3.1 refuses or changes."""

from __future__ import annotations

import builtins
import enum
import functools
import socket
import sys
import types
import typing
import weakref
from typing import TYPE_CHECKING, Any

from cloudpickle.cloudpickle import _code_reduce as reduce_code

from notebook_launcher.travel.kinds import MAIN

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["mend_class", "reduce_compiled", "reduce_special"]

APART = (enum.Enum, tuple)
"""Classes whose subclasses keep cloudpickle's way with `__slots__`."""
FILE = 10
"""Place of the file among the arguments of `types.CodeType`, in every Python so far."""


def reduce_special(obj: Any) -> tuple[Any, ...] | None:
    """Return the reduction of an object of one of a few types; None for all other types."""
    if (reduce := _REDUCTIONS.get(type(obj))) is not None:
        return reduce(obj)
    # IPython's `exit` and `quit`, which hold the shell; it need not be installed.
    if type(obj).__module__ == "IPython.core.autocall" and type(obj).__name__.endswith("ExitAutocall"):
        return getattr, (sys, "exit")
    return None


def reduce_compiled(function: types.FunctionType) -> tuple[Any, ...] | None:
    """Return the reduction of a function that `torch.compile` returned; None for all other functions.

    Such a function is a closure of torch's, whose globals cannot travel. Its settings and the user's function can, as
    they do for a compiled module.
    """
    original = getattr(function, "_torchdynamo_orig_callable", None)
    if original is None or "self" not in function.__code__.co_freevars:
        return None
    cell = (function.__closure__ or ())[function.__code__.co_freevars.index("self")]
    return _compile, (cell.cell_contents, original)


def mend_class(cls: type, reduced: Any) -> None:
    """Correct cloudpickle's reduction of a class that travels by value.

    A nested class would arrive without its qualified name, and plain pickle, which finds classes by that name, would
    fail in the ranks and in their data-loader workers. Descriptors of `__slots__` with private names would be left in
    the state. `__slots__` would be set when the class is there, which comes too late: its objects would have a
    `__dict__`, and the kernel, whose class has none, could not rebuild one that is returned.
    """
    attributes = reduced[2][0]
    attributes["__qualname__"] = cls.__qualname__
    slots = attributes.get("__slots__", ())
    for name in [slots] if isinstance(slots, str) else slots:
        if name.startswith("__") and not name.endswith("__"):
            attributes.pop(f"_{cls.__name__.lstrip('_')}{name}", None)
    # An enumeration's reduction has no namespace, and a named tuple makes its slots by itself.
    if isinstance(slots, (str, tuple, list, dict)) and "__slots__" in attributes and not issubclass(cls, APART):
        namespace: dict[str, Any] = reduced[1][3]
        namespace["__slots__"] = attributes.pop("__slots__")


def _reduce_cached_property(obj: functools.cached_property[Any]) -> tuple[Any, ...]:
    # Before Python 3.12 it holds a lock.
    return functools.cached_property, (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}


def _reduce_weak_dict(obj: Any) -> tuple[Any, ...]:
    return type(obj), (dict(obj),)


def _reduce_method(method: types.MethodType) -> tuple[Any, ...] | None:
    # In a kernel `input` and `getpass` are methods of the kernel; a rank has its own versions, which ask the cell.
    if method == builtins.input:
        return _builtin, ("input",)
    if "getpass" in sys.modules and method == sys.modules["getpass"].getpass:
        return _getpass, ()
    return None


def _reduce_new_type(obj: Any) -> tuple[Any, ...] | None:
    return None if _is_found(obj) else (_new_type, (obj.__name__, obj.__supertype__, obj.__module__))


def _reduce_parameters(obj: Any) -> tuple[Any, ...] | None:
    return None if _is_found(obj) else (_parameters, (type(obj), obj.__name__, obj.__module__))


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    # cloudpickle 3.1.3 writes `<dynamic-code>` for the file, so tracebacks would have neither cell nor line.
    make, args = reduce_code(code)
    return make, (*args[:FILE], code.co_filename, *args[FILE + 1 :])


def _reduce_capsule(obj: Any) -> tuple[Any, ...] | None:
    # pybind11 keeps one among the builtins, up to torch 2.6; the namespace of a module holds the builtins.
    name = next((name for name, value in vars(builtins).items() if value is obj), None)
    return None if name is None else (_builtin, (name,))


_REDUCTIONS: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {
    functools.cached_property: _reduce_cached_property,
    weakref.WeakKeyDictionary: _reduce_weak_dict,
    weakref.WeakValueDictionary: _reduce_weak_dict,
    types.CodeType: _reduce_code,
    types.MethodType: _reduce_method,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_parameters,
    type(socket.CAPI): _reduce_capsule,
}
if sys.version_info >= (3, 11):
    _REDUCTIONS[typing.TypeVarTuple] = _reduce_parameters


def _is_found(obj: Any) -> bool:
    """Return True if the other side finds the object by its name, as pickle assumes."""
    module = sys.modules.get(obj.__module__)
    return obj.__module__ not in MAIN and getattr(module, obj.__name__, None) is obj


def _new_type(name: str, supertype: Any, module: str) -> Any:
    made = typing.NewType(name, supertype)  # type: ignore[misc]  # mypy wants a literal name
    made.__module__ = module
    return made


def _parameters(cls: Callable[[str], Any], name: str, module: str) -> Any:
    made = cls(name)
    made.__module__ = module
    return made


def _builtin(name: str) -> Any:
    return getattr(builtins, name, None)


def _getpass() -> Any:
    import getpass

    return getpass.getpass


def _compile(settings: Callable[[Any], Any], function: Any) -> Any:
    return settings(function)
