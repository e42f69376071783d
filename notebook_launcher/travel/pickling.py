"""The picklers: cloudpickle, with tensors out of band, and refusals where a copy would be wrong.

What torch's own pickling keeps is kept: values, dtypes, strides, subclasses, `requires_grad`, and the
sharing of one storage by several tensors. What it drops is dropped: `.grad`, and the graph behind a
non-leaf tensor, which arrives as a leaf. A view takes its whole storage along. Tensors of a GPU arrive
as CPU tensors, whichever device the other side has.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import sys
import types
from collections.abc import Callable
from functools import _lru_cache_wrapper
from typing import TYPE_CHECKING, Any

import cloudpickle
from cloudpickle.cloudpickle import _dynamic_class_reduce as reduce_class

from notebook_launcher.travel import namespace, reductions
from notebook_launcher.travel.kinds import MAIN, Kind, describe_object, kind_of_type
from notebook_launcher.travel.namespace import ImportPath, import_path, kept_objects, reduce_by_path
from notebook_launcher.travel.reductions import operators_named, reduce_exception, reduce_of_torch, restore_attributes

if TYPE_CHECKING:
    import torch

BufferCallback = Callable[[pickle.PickleBuffer], Any]

BY_NAME = 2
"""Number of parts of a reduction without a state, which the few classes have that cloudpickle finds by name."""


class Refused(pickle.PicklingError):
    """The pickler met an object of a kind that stays in its process."""


class TravelPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """Pickler with the rules for both directions."""

    to_rank = False
    """True if the objects go from the kernel to a rank."""

    def __init__(self, file: Any, buffer_callback: BufferCallback) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.modules: set[str] = set()
        """Names of the modules that the other side will import."""
        self._kinds: dict[type, Kind | None] = {}
        self._kept: set[int] = set()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction of one object; the pickler calls this for all but the plainest types."""
        cls = type(obj)
        if cls not in self._kinds:
            self._kinds[cls] = kind_of_type(cls)
            self._kept |= kept_objects(cls)
        if self._kinds[cls] is not None and not _is_standard_stream(obj):
            raise Refused(f"{describe_object(obj)} cannot travel to another process")
        if issubclass(cls, type) or cls in (types.FunctionType, _lru_cache_wrapper):
            return self.reduce_definition(obj)
        if cls is types.ModuleType:
            self.modules.add(obj.__name__)
        elif isinstance(obj, BaseException):
            return self.reduce_exception(obj)
        elif reduced := reductions.reduce_special(obj) or self.reduce_of_library(obj):
            return reduced
        elif _is_standard_stream(obj):
            return getattr, (sys, "stderr" if obj is sys.stderr else "stdout")
        elif "torch" in sys.modules:
            reduced = self._reduce_storage(obj)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)

    def reduce_of_library(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the reduction of an object of torch, or of one that a library keeps; None for all others."""
        if reduced := reduce_of_torch(obj, to_rank=self.to_rank):
            return reduced
        reduced = reduce_by_path(obj, is_kept=id(obj) in self._kept)
        if reduced is not None:
            self.modules.add(reduced[1][0].module)
        return reduced

    def reduce_definition(self, obj: Any) -> Any:
        """Return the reduction of a function or class."""
        if isinstance(obj, _lru_cache_wrapper) and _is_local(obj):
            # Otherwise it would be pickled by name, and the other side has no such name.
            parameters = obj.cache_parameters()
            return _rebuild_cached, (parameters["maxsize"], parameters["typed"], obj.__wrapped__)
        if obj.__module__ == "torch._utils" and obj.__name__ == "_rebuild_tensor_v3":
            return _tensor_v3_rebuilder, ()
        if type(obj) is types.FunctionType and (compiled := reductions.reduce_compiled(obj)):
            return compiled
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and obj.__module__ in MAIN:
            # cloudpickle takes `__mp_main__` for a module that the other side can import.
            is_function = type(obj) is types.FunctionType
            reduced = self._dynamic_function_reduce(obj) if is_function else reduce_class(obj)
        if reduced is NotImplemented:
            self.modules.add(str(obj.__module__))
        elif isinstance(obj, type) and len(reduced) > BY_NAME:
            if path := import_path(obj):
                self.modules.add(path.module)
                return ImportPath.find, (path,)
            reductions.mend_class(obj, reduced)
        return reduced

    def reduce_exception(self, exc: BaseException) -> Any:
        """Return the reduction of an exception."""
        reduced = reduce_exception(exc)
        return NotImplemented if reduced is None else (*reduced, None, None, restore_attributes)

    def _reduce_storage(self, obj: Any) -> Any:
        import torch

        if isinstance(obj, torch.TypedStorage):
            # torch makes a new TypedStorage for every tensor; what they share lies beneath.
            untyped = obj._untyped_storage  # noqa: SLF001 - its public twin warns
            return _rebuild_typed, (self._storages.setdefault(_id_of(untyped), untyped), obj.dtype)
        if not isinstance(obj, torch.UntypedStorage):
            return None
        first = self._storages.setdefault(_id_of(obj), obj)
        if first is not obj:
            return _same, (first,)
        if obj.device.type == "meta":
            return functools.partial(torch.UntypedStorage, obj.nbytes(), device="meta"), ()
        storage = obj if obj.device.type == "cpu" else obj.cpu()
        memory = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
        memory.owner = storage  # type: ignore[attr-defined]  # as long as a buffer is held, so is this
        return _rebuild_storage, (pickle.PickleBuffer(memory),)


class CallPickler(TravelPickler):
    """Pickler of calls, from the kernel to ranks: definitions in `__main__` arrive in the rank's `__main__`."""

    to_rank = True

    def __init__(self, file: Any, buffer_callback: BufferCallback) -> None:
        super().__init__(file, buffer_callback)
        self.definitions = namespace.Definitions()
        # cloudpickle asks this table for the globals of a function, and would make a new dict.
        self.globals_ref[id(namespace.main_globals())] = namespace.MAIN_GLOBALS

    def reduce_definition(self, obj: Any) -> Any:
        """Return a reduction by value for the notebook's definitions, which are noted, and by name for other ones."""
        is_function = type(obj) is types.FunctionType
        if is_function and obj.__globals__.get("__name__") == "__mp_main__":
            self.globals_ref[id(obj.__globals__)] = namespace.MAIN_GLOBALS
        if is_function and obj.__globals__ is namespace.main_globals() and obj.__module__ not in MAIN:
            # Under the name that functools.wraps gave it there may be itself, in the place of a library's function.
            reduced = self._dynamic_function_reduce(obj)
        else:
            reduced = super().reduce_definition(obj)
            if reduced is not NotImplemented and (is_function or isinstance(obj, type)):
                reduced = namespace.reference_to_original(obj) or reduced
        if reduced is not NotImplemented and not (isinstance(obj, type) and len(reduced) <= BY_NAME):
            self.definitions.add(obj)
            if type(obj) is types.FunctionType and len(reduced) > BY_NAME:
                # cloudpickle's list of what a function needs without having a variable for it.
                reduced[2][1]["_cloudpickle_submodules"].extend(operators_named(obj))
        return reduced


class SharingCallPickler(CallPickler):
    """Pickler of calls to ranks that have made some of the notebook's definitions by themselves."""

    def __init__(self, file: Any, buffer_callback: BufferCallback, *, shared: namespace.SharedNames) -> None:
        super().__init__(file, buffer_callback)
        self._shared = shared

    def reducer_override(self, obj: Any) -> Any:
        """Return a reduction by name for what the ranks have of their own, otherwise the usual one."""
        return self._shared.reference_to(obj) or super().reducer_override(obj)


class ValuePickler(TravelPickler):
    """Pickler of values, from a rank to the kernel: definitions of the kernel are pickled by reference."""

    def reduce_definition(self, obj: Any) -> Any:
        """Return a reduction by reference for the kernel's definitions, otherwise the usual one."""
        return namespace.reference_to(obj) or super().reduce_definition(obj)


class ExceptionPickler(ValuePickler):
    """Pickler of exceptions, from a rank to the kernel: leaves out attributes that cannot travel."""

    def reduce_exception(self, exc: BaseException) -> Any:
        """Return a reduction without the attributes that cannot travel; notes of the exception name them."""
        reduced = super().reduce_exception(exc)
        if reduced is NotImplemented:
            return reduced
        rebuild, (cls, args), state, *rest = reduced
        lost = {name: value for name, value in state.items() if pickling_error(value, ExceptionPickler)}
        state = {name: value for name, value in state.items() if name not in lost}
        kept = tuple(repr(arg) if pickling_error(arg, ExceptionPickler) else arg for arg in args)
        notes = [f"The attribute `{name}`, {describe_object(lost[name])}, stayed in the rank." for name in lost]
        notes += [
            f"The argument {i}, {describe_object(arg)}, stayed in the rank."
            for i, (arg, other) in enumerate(zip(args, kept, strict=True))
            if arg is not other
        ]
        if notes:
            state["__notes__"] = [*state.get("__notes__", ()), *notes]
        return rebuild, (cls, kept), state, *rest


MakePickler = Callable[[Any, BufferCallback], TravelPickler]


class _ByteCounter(io.RawIOBase):
    """A file that counts the bytes written to it and drops them."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        return len(data)

    def add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.size += buffer.raw().nbytes


def pickling_error(value: object, make_pickler: MakePickler) -> Exception | None:
    """Return the error that pickling a value raises; None if the value can be pickled."""
    return rehearse(value, make_pickler)[1]


def rehearse(value: object, make_pickler: MakePickler) -> tuple[int, Exception | None]:
    """Pickle a value without keeping a byte; return the number of bytes, and the error that ended it or None."""
    counter = _ByteCounter()
    try:
        make_pickler(counter, counter.add_buffer).dump(value)
    except Exception as error:  # a user's __reduce__ may raise anything
        return counter.size, error
    return counter.size, None


def _id_of(storage: torch.UntypedStorage) -> int:
    # Identifies the memory, because several Python objects may refer to one storage.
    number: int = storage._cdata  # noqa: SLF001
    return number


def _is_local(definition: Any) -> bool:
    name = getattr(definition, "__qualname__", "<locals>")  # a cached functools.partial has none
    return definition.__module__ in MAIN or "<locals>" in name


def _is_standard_stream(obj: object) -> bool:
    return obj is sys.stdout or obj is sys.stderr


def _rebuild_cached(maxsize: int | None, typed: bool, function: Callable[..., Any]) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _same(obj: object) -> object:
    return obj


def _rebuild_storage(buffer: memoryview) -> torch.UntypedStorage:
    import torch

    if not buffer.nbytes:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _rebuild_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _tensor_v3_rebuilder() -> Callable[..., Any]:
    """Return a replacement for torch's function that rebuilds float8 and unsigned tensors.

    torch pickles their storage untyped, but torch's function expects a typed storage, whose dtype it ignores.
    """
    import torch

    rebuild_tensor: Callable[..., Any] = torch._utils._rebuild_tensor_v3  # noqa: SLF001 - in every pickle

    def rebuild(storage: torch.UntypedStorage, *args: Any) -> Any:
        return rebuild_tensor(_rebuild_typed(storage, torch.uint8), *args)

    return rebuild
