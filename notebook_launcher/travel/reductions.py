"""Reductions for objects that notebooks define and that cloudpickle 3.1 refuses or changes."""

from __future__ import annotations

import builtins
import copyreg
import enum
import functools
import importlib
import inspect
import io
import socket
import sys
import types
import typing
import weakref
from typing import TYPE_CHECKING, Any

from cloudpickle.cloudpickle import _code_reduce as reduce_code

from notebook_launcher.travel import cells
from notebook_launcher.travel.kinds import MAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    return cell.cell_contents, (original,)


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


def _reduce_method(method: types.MethodType) -> tuple[Any, ...] | None:
    # In a kernel `input` and `getpass` are methods of the kernel; a rank has its own versions, which ask the cell.
    if method == builtins.input:
        return getattr, (builtins, "input")
    if "getpass" in sys.modules and method == sys.modules["getpass"].getpass:
        return getattr, (sys.modules["getpass"], "getpass")
    return None


def _reduce_parameters(obj: Any) -> tuple[Any, ...] | None:
    return None if _is_found(obj) else (_parameters, (type(obj), obj.__name__, obj.__module__))


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    # cloudpickle 3.1.3 writes `<dynamic-code>` for the file, so tracebacks would have neither cell nor line.
    make, args = reduce_code(code)
    return make, (*args[:FILE], code.co_filename, *args[FILE + 1 :])


def _reduce_capsule(obj: Any) -> tuple[Any, ...] | None:
    # pybind11 keeps one among the builtins, up to torch 2.6; the namespace of a module holds the builtins.
    name = next((name for name, value in vars(builtins).items() if value is obj), None)
    return None if name is None else (getattr, (builtins, name, None))


_REDUCTIONS: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {
    # Before Python 3.12 it holds a lock.
    functools.cached_property: lambda obj: (type(obj), (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}),
    weakref.WeakKeyDictionary: lambda obj: (type(obj), (dict(obj),)),
    weakref.WeakValueDictionary: lambda obj: (type(obj), (dict(obj),)),
    types.CodeType: _reduce_code,
    types.MethodType: _reduce_method,
    typing.NewType: lambda obj: (
        None if _is_found(obj) else (_new_type, (obj.__name__, obj.__supertype__, obj.__module__))
    ),
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


# --------------------------------------------------------------------------------------------------------------------
# Reductions of torch's objects that pickle refuses, or of which it drops a part.
#
# An optimizer keeps its hooks and the mark of a scheduler, an operator that a cell made with
# `torch.library.custom_op` is made again with all that was registered for it, a module with parametrizations is
# rebuilt from its bare class, and what `torch.jit` made travels in torch's own format.


HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
STEPPED = "_opt_called"
"""The mark that is set by the function with which a scheduler replaces `step`."""
SAVED = {"torch.jit": ("ScriptModule", "ScriptFunction"), "torch.export": ("ExportedProgram",)}
"""Classes by the module whose `save` and `load` write and read their objects."""
OPERATORS = "torch._library.custom_ops"
"""The module of the class of operators; it keeps all of them by name."""


def reduce_of_torch(obj: Any, *, to_rank: bool) -> tuple[Any, ...] | None:
    """Return the reduction of an object of torch; None for other objects, and if pickle alone drops nothing.

    On its way `to_rank`, an operator of a cell is made there.
    """
    if "torch" not in sys.modules:
        return None
    cls = type(obj)
    if cls.__module__ == OPERATORS and cls.__name__ == "CustomOpDef":
        return _reduce_operator(obj, to_rank=to_rank)
    if cls.__module__ == "torch._ops" and (operator := _operator_of(obj)) is not None:
        return _overloads, (operator, type(obj).__name__ == "OpOverload" and obj._overloadname)  # noqa: SLF001
    for module, classes in SAVED.items():
        if any(isinstance(obj, getattr(sys.modules.get(module), name, ())) for name in classes):
            file = io.BytesIO()
            sys.modules[module].save(obj, file)
            return _load, (module, file.getvalue())
    return _reduce_parametrized(obj) or _reduce_optimizer(obj)


# Operators


def operators_named(function: types.FunctionType) -> Iterator[Any]:
    """Yield the operators of cells that a function's code reaches through `torch.ops`, as in `torch.ops.my.op`."""
    made = getattr(sys.modules.get(OPERATORS), "OPDEFS", None)
    if not made:
        return
    names = {name for code in cells.codes_in(function.__code__) for name in code.co_names}
    if "ops" in names:
        for operator in list(made.values()):
            if _is_of_a_cell(operator) and {operator._namespace, operator._name} <= names:  # noqa: SLF001
                yield operator


def _is_of_a_cell(operator: Any) -> bool:
    return operator._init_fn.__module__ in MAIN  # noqa: SLF001 - it has no public attributes


def _operator_of(obj: Any) -> Any:
    """Return the operator of a cell whose overloads, or one of them, this is; None for all others."""
    name = str(getattr(obj, "_qualified_op_name", None) or getattr(obj, "_name", None)).partition(".")[0]
    operator = getattr(sys.modules.get(OPERATORS), "OPDEFS", {}).get(name)
    return operator if operator is not None and _is_of_a_cell(operator) else None


def _reduce_operator(operator: Any, *, to_rank: bool) -> tuple[Any, ...]:
    made: Any = vars(operator)
    name = f"{made['_namespace']}::{made['_name']}"
    if not (to_rank and _is_of_a_cell(operator)):
        return _operator_named, (name, operator._init_fn.__module__)  # noqa: SLF001 - as below
    kernels = {device: _registered(kernel) for device, kernel in made["_backend_fns"].items()}
    later = {part: made.get(part) for part in ("_init_fn", "_abstract_fn", "_backward_fn", "_setup_context_fn")}
    registered = (kernels, made.get("_vmap_fn"), made.get("_autocast_dtype") or {}, made["_torch_dispatch_fns"])
    # Its functions may use the operator, which therefore has to be there before they are.
    return _make_operator, (name, made["_schema"], made.get("_tags")), (later, registered), None, None, _register


def _registered(kernel: Callable[..., Any]) -> Any:
    """Return the user's function in the closure of torch's, which chooses between it and the operator's own."""
    inner: Any = inspect.unwrap(kernel)
    return inspect.getclosurevars(inner).nonlocals.get("fn", inner)


def _make_operator(name: str, schema: str, tags: Any) -> Any:
    from torch._library.custom_ops import CustomOpDef

    namespace, _, own_name = name.partition("::")
    # The function is set later. An operator of an earlier call with this name is replaced.
    return CustomOpDef(namespace, own_name, schema, _make_operator, *([tags] if tags else []))


def _register(operator: Any, state: tuple[dict[str, Any], tuple[Any, ...]]) -> None:
    later, (kernels, batched, autocast, dispatched) = state
    vars(operator).update(later)
    for device, kernel in kernels.items():
        operator.register_kernel(device)(kernel)
    if batched is not None:
        operator.register_vmap(batched)
    for device, dtype in autocast.items():
        operator.register_autocast(device, dtype)
    for cls, function in dispatched.items():
        operator.register_torch_dispatch(cls, function)


def _operator_named(name: str, module: str) -> Any:
    if module not in MAIN:
        importlib.import_module(module)
    operator = getattr(sys.modules.get(OPERATORS), "OPDEFS", {}).get(name)
    if operator is None:
        raise LookupError(f"the operator {name} is not defined here")
    return operator


def _overloads(operator: Any, overload: str | bool) -> Any:  # from a reduction
    import torch

    packet = getattr(getattr(torch.ops, operator._namespace), operator._name)  # noqa: SLF001 - as above
    return getattr(packet, overload) if isinstance(overload, str) else packet


def _load(module: str, data: bytes) -> Any:  # what torch saves in a format of its own
    return importlib.import_module(module).load(io.BytesIO(data))


# Modules with parametrizations


def _reduce_parametrized(module: Any) -> tuple[Any, ...] | None:
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    if parametrize is None or not isinstance(module, sys.modules["torch"].nn.Module):
        return None
    if not parametrize.is_parametrized(module):
        return None
    cls = parametrize.type_before_parametrizations(module)
    state = getattr(cls, "__getstate__", vars)(module)
    return object.__new__, (cls,), state, None, None, _parametrize


def _parametrize(module: Any, state: dict[str, Any]) -> None:
    from torch.nn.utils import parametrize

    module.__setstate__(state)
    # Torch has no public way to give a module its properties without new parameters.
    parametrize._inject_new_class(module)  # noqa: SLF001
    for name in module.parametrizations:
        parametrize._inject_property(module, name)  # noqa: SLF001


# Optimizers


def _reduce_optimizer(obj: Any) -> tuple[Any, ...] | None:
    """Return the reduction of an optimizer that keeps its hooks, and the mark of a scheduler; None if there are none.

    A scheduler replaces `step` of its optimizer by a function that records each call, and at its own first step warns
    if `step` is another function. Pickle rebuilds the optimizer with the method of its class.
    """
    torch = sys.modules.get("torch.optim")
    if torch is None or not isinstance(obj, torch.Optimizer):
        return None
    dropped = {name: vars(obj)[name] for name in (*HOOKS, STEPPED) if vars(obj).get(name)}
    scheduled = hasattr(obj.step, "_wrapped_by_lr_sched")
    if not (dropped or scheduled):
        return None
    if any({"__reduce__", "__reduce_ex__"} & vars(base).keys() for base in type(obj).__mro__[:-1]):
        return None  # its class decides what travels
    rebuild, args, state, *_ = obj.__reduce_ex__(5)
    return rebuild, args, (state, dropped, scheduled), None, None, _restore


def _restore(optimizer: Any, state: tuple[Any, dict[str, Any], bool]) -> None:
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.hooks import RemovableHandle

    own, dropped, scheduled = state
    optimizer.__setstate__(own)
    vars(optimizer).update(dropped)
    # A later hook with the number of one of these would replace it.
    numbers = [number for hooks in dropped.values() if isinstance(hooks, dict) for number in hooks]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(number + 1 for number in numbers)])
    if scheduled:

        class Mark(LRScheduler):
            """A scheduler that replaces `step` of its optimizer, and leaves learning rates alone."""

            def _initial_step(self) -> None:
                pass

        Mark(optimizer)


# --------------------------------------------------------------------------------------------------------------------
# Exceptions that arrive as their own type, whatever their constructor asks for.
#
# Python rebuilds an exception by calling its class with `args`, which fails where the constructor asks for others
# than it passes on, as `__init__(self, code, text)` with `super().__init__(text)` does.
#
# Here the object is made by the nearest built-in base, `__init__` of the user's class is not called, and the
# attributes are set, those in `__slots__` and of frozen data classes too. Classes with a `__reduce__` of their own in
# Python keep it.


# Set for types that a class statement, or an extension at run time, made.
HEAP_TYPE = 1 << 9


def reduce_exception(exc: BaseException) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return the reduction of an exception; None if its class defines its own.

    The traceback, the cause and the context do not travel, as with pickle.
    """
    cls = type(exc)
    if isinstance(cls.__reduce__, types.FunctionType) or cls.__reduce_ex__ is not object.__reduce_ex__:
        return None
    reduced = cls.__reduce__(exc)
    if not isinstance(reduced, tuple) or reduced[0] is not cls:
        return None
    state = reduced[2] if len(reduced) > 2 else None
    names = copyreg._slotnames(cls)  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle does
    slots = {name: getattr(exc, name) for name in names if hasattr(exc, name)}
    return rebuild_exception, (cls, reduced[1]), {**slots, **(state or {})}


def rebuild_exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Create an exception without calling an `__init__` that its class may define."""
    base: Any = next(c for c in cls.__mro__ if not c.__flags__ & HEAP_TYPE)
    exc: BaseException = base.__new__(cls, *args)
    base.__init__(exc, *args)
    return exc


def restore_attributes(exc: BaseException, attributes: dict[str, Any]) -> None:
    """Set the attributes that `reduce_exception` returned, bypassing a `__setattr__` that refuses."""
    for name, value in attributes.items():
        BaseException.__setattr__(exc, name, value)
