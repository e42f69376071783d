"""Packs and unpacks calls, values and exceptions that travel between the kernel and the ranks, by descriptor.

A descriptor refers to a parcel, an anonymous file in memory (`parcel.py`); packing returns it, unpacking closes it.
Only those that came over the package's own sockets may be unpacked, because a parcel runs code, as every pickle does.
Tensors and contiguous NumPy arrays arrive without a copy, writable, and private to the process that unpacked them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
from typing import TYPE_CHECKING, Any

from notebook_launcher.errors import CaptureError, ResourceError, ReturnValueError
from notebook_launcher.travel import changed_modules, namespace, pickling, replacements, settings
from notebook_launcher.travel.function_call import FunctionCall as FunctionCall
from notebook_launcher.travel.parcel import Notes, ParcelWriter, open_parcel
from notebook_launcher.travel.replacements import ReplacedAttributes, Replacement, Replacer, replaced_attributes_of
from notebook_launcher.travel.unpicklable import Part, find_unpicklable, largest_parts
from notebook_launcher.wording import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from notebook_launcher.messaging.channel import AnonymousFile

SECONDS_PER_GB = 0.5
"""Time of a copy into shared memory, measured; the first write to such memory takes longer on some machines."""
ANNOUNCED_SIZE = 1 << 30
"""Bytes of a call from which on its size is told before it is sent."""
MOST_CALLS, MOST_OF_TEXT = 3, 80
"""Calls that a line names, and characters of each."""
CAPTURED_BY_STEP = re.compile(r"\bthe function (the %%everywhere cell \S+|setup=) captures\b")


def pack_call(
    call: FunctionCall, *, start: Callable[[], object] = lambda: None, tell: Callable[[str], object] = lambda _: None
) -> AnonymousFile:
    """Pack a function with its closure and arguments; return a file, whose descriptor any number of ranks may unpack.

    `start` is called once everything is known to be picklable, and before large data are copied, so that processes
    start up during the copy. `tell` takes a line about a call of more than a gigabyte before that.

    Raises:
        CaptureError: An object cannot travel; the message names the object.
        ResourceError: Memory is short.
    """
    roots = [
        Part(call.fn, root=getattr(call.fn, "__name__", "fn")),
        *(Part(arg, root=f"args[{i}]") for i, arg in enumerate(call.args)),
        *(Part(arg, root=f"kwargs[{name!r}]") for name, arg in call.kwargs.items()),
        *(Part(step.run, root=step.what) for step in call.steps),
        *(Part(v, functions=(step.what,), root=name) for step in call.steps for name, v in step.variables.items()),
    ]
    make_pickler: Callable[..., pickling.CallPickler] = pickling.CallPickler
    if any(step.shared for step in call.steps):
        make_pickler = functools.partial(pickling.SharingCallPickler, shared=namespace.SharedNames(call.steps))
    replaced = replaced_attributes_of(os.getpid())
    replacements, left = replaced.look(), _describe_calls(replaced)
    if replaced.has_unable:
        replacements, unable = _able_to_travel(replaced, replacements, make_pickler)
        left += unable
    parcel = ParcelWriter("call", what="the captured data need")
    try:
        with _naming_what_is_large(roots, make_pickler):
            try:
                notes = _pickle_call(parcel, roots, call, make_pickler, replacements, left)
            except CaptureError:
                # Only now, because it would pickle each value twice in every launch.
                able, unable = _able_to_travel(replaced, replacements, make_pickler)
                if len(able) == len(replacements):
                    raise
                parcel.discard()
                parcel = ParcelWriter("call", what="the captured data need")
                notes = _pickle_call(parcel, roots, call, make_pickler, able, left + unable)
            parcel.check_room()
        if parcel.size >= ANNOUNCED_SIZE:
            tell(_describe_large(parcel.size, roots, make_pickler))
        start()
        with _naming_what_is_large(roots, make_pickler):
            return parcel.seal(notes)
    finally:
        parcel.discard()


def _pickle_call(
    parcel: ParcelWriter,
    roots: list[Part],
    call: FunctionCall,
    make_pickler: Callable[..., pickling.CallPickler],
    replacements: list[Replacement],
    left: tuple[str, ...],
) -> Notes:
    """Pickle everything but the buffers; return the notes for the end of the parcel."""
    replaced = replaced_attributes_of(os.getpid())
    pickler = make_pickler(parcel, parcel.add_buffer)

    def dump_with_definitions(part: object) -> None:
        pickler.dump(part)
        pickler.dump(pickler.definitions.pack(lambda outer: pickling.pickling_error(outer, make_pickler) is None))

    try:
        pickler.dump(settings.read_settings(replaced.called))
        pickler.dump(len(call.steps))
        for step in call.steps:  # Each may use what the one before it has defined in the rank.
            dump_with_definitions(step)
        pickler.dump([tuple(replacement.place) for replacement in replacements])
        pickler.dump([tuple(replacement)[1:] for replacement in replacements])
        dump_with_definitions(call[:3])
        pickler.dump(changed_modules.importers_of(pickler.modules))
        changed = (each.place for each in replacements if each.place not in replaced.registered)
        new = replaced.untold([*changed, *replaced.owners])
        return Notes(tuple(sorted(pickler.modules)), tuple(map(str, new)), left)
    except ResourceError:
        raise
    except Exception as error:
        unpicklable = find_unpicklable(roots, make_pickler)
        name = getattr(call.fn, "__qualname__", repr(call.fn))
        message = f"the function {name} or its arguments cannot travel to another process: {error}"
        if unpicklable is not None:
            message = CAPTURED_BY_STEP.sub(r"\1 uses", unpicklable.in_call())
        raise CaptureError(message) from error


def _describe_large(size: int, roots: list[Part], make_pickler: pickling.MakePickler) -> str:
    largest = largest_parts(roots, make_pickler)
    return (
        f"{format_bytes(size)} of the notebook's data travel to the ranks{largest and f'; {largest}'}. They are copied "
        f"once into shared memory for all ranks, which takes {format_seconds(size / 1e9 * SECONDS_PER_GB)} or more; to "
        "save both, load them inside the function"
    )


def _describe_calls(replaced: ReplacedAttributes) -> tuple[str, ...]:
    """Return a notice about calls of cells whose effect ranks do not have; empty if there is no new one."""
    texts = [f"`{text[:MOST_OF_TEXT]}{'…' * (len(text) > MOST_OF_TEXT)}`" for text in replaced.untold_calls()]
    if not texts:
        return ()
    more = f" and {len(texts) - MOST_CALLS} more" if len(texts) > MOST_CALLS else ""
    done = f"ranks lack what {', '.join(texts[:MOST_CALLS])}{more} {'has' if len(texts) == 1 else 'have'} done"
    return (f"{done} in the notebook. If the function needs it, run it in a `%%everywhere` cell",)


def repeated_calls() -> list[replacements.Call]:
    """Return the calls that register something where no search finds it, such as a codec, and that ranks repeat."""
    replaced = replaced_attributes_of(os.getpid())
    replaced.read()
    return replaced.repeated(lambda values: pickling.pickling_error(values, pickling.CallPickler) is None)


def _able_to_travel(
    replaced: ReplacedAttributes, replacements: list[Replacement], make_pickler: pickling.MakePickler
) -> tuple[list[Replacement], tuple[str, ...]]:
    """Return the replacements whose values can travel; and of the others, the reason at the first time.

    The others do not prevent the call: most functions use nothing of what a notebook changes for itself.
    """
    able, left = [], []
    for replacement in replacements:
        if replacement.is_deleted or pickling.pickling_error(tuple(replacement), make_pickler) is None:
            able.append(replacement)
        elif replaced.untold([replacement.place]):
            found = find_unpicklable([Part(replacement.value, root=str(replacement.place))], make_pickler)
            reason = found.in_call() if found else str(replacement.place)
            is_registered = replacement.place in replaced.registered
            left.append(reason + " Or run the cell that registers it by `%%everywhere`." * is_registered)
    replaced.has_unable = len(able) < len(replacements)
    return able, tuple(left)


@contextlib.contextmanager
def _naming_what_is_large(roots: list[Part], make_pickler: pickling.MakePickler) -> Iterator[None]:
    try:
        yield
    except ResourceError as error:
        largest = largest_parts(roots, make_pickler)
        raise ResourceError(f"{error} ({largest})" if largest else str(error)) from error


def unpack_call(
    fd: int,
    *,
    follow_settings: Callable[[dict[str, Any]], None] = lambda _: None,
    replacer: Replacer | None = None,
    run_step: Callable[[settings.SetupStep], None] = lambda _: None,
) -> tuple[FunctionCall, list[str]]:
    """Unpack a call in a rank, and install the notebook's definitions in its `__main__`.

    Args:
        fd: Descriptor of the parcel.
        follow_settings: Called with the kernel's settings of libraries, before any object is made.
        replacer: Sets what the notebook has replaced in libraries, before the function is unpacked.
        run_step: Called with each step of the call in turn, before the function and its arguments are made.

    Returns:
        The call, and the names of the rank's own global variables that were overwritten.

    Raises:
        Exception: An import or the rebuilding of an object failed, for example with ModuleNotFoundError; or a step did.
    """
    parcel, before = open_parcel(fd), dict(namespace.main_globals())
    unpickler = namespace.KnownClassesUnpickler(parcel.file, buffers=parcel.buffers)
    follow_settings(unpickler.load())
    for _ in range(unpickler.load()):
        step = unpickler.load()
        namespace.unpack_definitions(unpickler.load())
        with namespace.noting_names_of(step):
            run_step(step)
    replacer = replacer or Replacer()
    places = [replacements.Place(*place) for place in unpickler.load()]
    replacer.put_back(except_for=places)
    values = unpickler.load()
    if places:
        _import_for_effect(parcel.notes.modules)  # Now, as in the kernel: what they import by value is the original.
        replacer.replace(Replacement(place, *value) for place, value in zip(places, values, strict=True))
    call = FunctionCall(*unpickler.load())
    namespace.unpack_definitions(unpickler.load())
    _import_for_effect(unpickler.load())
    return call, namespace.overwritten_since(before)


def _import_for_effect(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # The function may do without it.
            importlib.import_module(name)


def pack_value(value: object) -> int:
    """Pack the value that the function returned.

    Raises:
        ReturnValueError: A part of the value cannot travel; the message holds the path inside the value.
        ResourceError: Memory is short.
    """
    try:
        return _pack(value, pickling.ValuePickler, "return value")
    except ResourceError:
        raise
    except Exception as error:
        unpicklable = find_unpicklable([Part(value, root="result")], pickling.ValuePickler)
        message = f"the return value cannot travel: {error}. Return plain data: numbers, strings, dicts, tensors."
        raise ReturnValueError(unpicklable.in_value() if unpicklable else message) from error


def unpack_value(fd: int) -> Any:
    """Unpack a value in the kernel; raises ReturnValueError if it cannot be rebuilt there."""
    try:
        return _unpack(fd)
    except Exception as error:
        raise ReturnValueError(
            f"the return value cannot be rebuilt in the notebook: {type(error).__name__}: {error}. Return plain "
            "data, or import the class in the notebook."
        ) from error


def pack_exception(exc: BaseException) -> int | None:
    """Pack an exception without its traceback, cause and context; None if it cannot travel.

    Attributes that cannot travel are left out, and named in the exception's notes.
    """
    try:
        return _pack(exc, pickling.ExceptionPickler, "exception")
    except Exception:  # the exception's report, which is plain data, travels in any case
        return None


def unpack_exception(fd: int) -> BaseException | None:
    """Unpack an exception in the kernel; None if it cannot be rebuilt there."""
    try:
        exc = _unpack(fd)
    except Exception:  # its class may raise anything; the report is enough
        return None
    return exc if isinstance(exc, BaseException) else None


def _pack(value: object, make_pickler: type[pickling.TravelPickler], what: str) -> int:
    parcel = ParcelWriter("value", what=f"the {what} needs")
    try:
        make_pickler(parcel, parcel.add_buffer).dump(value)
        return parcel.seal().detach()
    finally:
        parcel.discard()


def _unpack(fd: int) -> Any:
    parcel = open_parcel(fd)
    return namespace.HomeUnpickler(parcel.file, buffers=parcel.buffers).load()
