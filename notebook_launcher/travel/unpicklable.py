"""Finds the object that a function captured and that cannot travel, and names it.

The search runs only after pickling has failed. Every part of the failed object is pickled alone. Parts that fail are
taken apart in turn, breadth first, until one fails although all its parts can travel: this is the unpicklable part,
and the expression that leads to it is its name. The search is bounded in time and in depth.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
import types
from collections import deque
from functools import _lru_cache_wrapper
from typing import TYPE_CHECKING, Any

# Returns the globals that cloudpickle takes along. cloudpickle keeps the names for each code object, so the call takes
# no time for a function that was just pickled.
from cloudpickle.cloudpickle import _extract_code_globals as globals_of_code

from notebook_launcher.travel.cells import last_cell_that_set
from notebook_launcher.travel.kinds import SHELL, describe_object, kind_of_type
from notebook_launcher.travel.namespace import main_globals
from notebook_launcher.travel.pickling import MakePickler, pickling_error, rehearse
from notebook_launcher.wording import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

TIME_LIMIT = 3.0
DEPTH_LIMIT = 40
WORTH_MENTIONING = 100_000_000
"""Bytes below which its size is not what keeps something from travelling."""
UNPICKLED_MEMBERS = {"__dict__", "__weakref__", "_abc_impl"}
MODULE_TABLE = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """An object inside the call or value that failed, with the expression that leads to it."""

    value: Any
    functions: tuple[str, ...] = ()
    """The functions on the way to the object, outermost first."""
    root: str = ""
    """The captured name within the last function, or `args[0]`, `result`."""
    path: str = ""
    """The rest of the expression, after the root: `.logger.file`, `['lock']`."""
    is_default: bool = False
    is_global: bool = False
    """True if the root is a variable of the notebook, and not of a function around."""

    @property
    def expression(self) -> str:
        """The expression as a user would type it: `trainer.logger.file`."""
        return MODULE_TABLE.sub(r".\1", self.root + self.path)

    def inside(self, step: str, value: Any) -> Part:
        """Return a part of this object, one step further: `.logger`, `['lock']`."""
        return dataclasses.replace(self, value=value, path=self.path + step)


@dataclasses.dataclass(frozen=True, slots=True)
class Unpicklable:
    """The part that cannot travel, and the error that pickling it raises."""

    part: Part
    error: Exception

    def in_call(self) -> str:
        """Return the message for a function that captured it."""
        part = self.part
        kind = kind_of_type(type(part.value))
        name = f"`{part.expression}`" if part.expression else "the object"
        advice = kind.in_call if kind else f"{self._reason()} Create {{name}} inside the function, or pass plain data."
        advice = advice.replace("{name}", name)
        if kind is SHELL and part.root == "self" and len(part.functions) > 1:
            return f"the function {part.functions[-2]} uses `get_ipython()`, directly or by a magic. {advice}"
        return f"{self._subject()}, which cannot travel to another process.{self._origin} {advice}"

    def in_value(self) -> str:
        """Return the message for a function that returned it."""
        kind = kind_of_type(type(self.part.value))
        advice = kind.in_value if kind else f"{self._reason()} Return plain data: numbers, strings, dicts, tensors."
        captured = f", captured by the function {self.part.functions[-1]}," if self.part.functions else ""
        described = describe_object(self.part.value)
        return f"the return value cannot travel: `{self.part.expression}`{captured} is {described}. {advice}"

    def _subject(self) -> str:
        part, what = self.part, describe_object(self.part.value)
        if not part.functions or not part.root:
            return f"`{part.expression}` is {what}" if part.expression else what
        function = part.functions[-1]
        chain = " -> ".join((*part.functions, part.root))
        through = f" ({chain})" if len(part.functions) > 1 else ""
        if part.is_default:
            return f"the default of `{part.expression}` in {function} is {what}{through}"
        if part.path:
            return f"`{part.expression}` (captured by {function} through `{part.root}`) is {what}{through}"
        return f"the function {function} captures `{part.root}`, {what}{through}"

    @property
    def _origin(self) -> str:
        """Sentence that names the cell which set the captured variable; empty if none is known."""
        cell = last_cell_that_set(self.part.root) if self.part.is_global else ""
        return f" `{self.part.root}` was set in {cell}." if cell else ""

    def _reason(self) -> str:
        text = str(self.error).strip().rstrip(".")
        return f"({type(self.error).__name__}: {text})" if text else f"({type(self.error).__name__})"


def find_unpicklable(roots: list[Part], make_pickler: MakePickler) -> Unpicklable | None:
    """Return the part that cannot travel and is nearest to the roots; None if none was found in time."""
    deadline = time.monotonic() + TIME_LIMIT
    queue: deque[tuple[Part, Exception, int]] = deque()
    seen: dict[int, Any] = {}  # values, not ids alone: what __reduce__ made must not be freed meanwhile

    def enqueue(parts: list[Part], depth: int) -> bool:
        failed = False
        for part in parts:
            if time.monotonic() > deadline:
                return True
            error = pickling_error(part.value, make_pickler)
            failed |= error is not None
            if error is not None and id(part.value) not in seen:
                seen[id(part.value)] = part.value
                queue.append((part, error, depth))
        return failed

    enqueue(roots, 0)
    while queue and time.monotonic() < deadline:
        part, error, depth = queue.popleft()
        if kind_of_type(type(part.value)) is not None:
            return Unpicklable(part, error)
        if depth < DEPTH_LIMIT and not enqueue(list(_parts(part)), depth + 1):
            return Unpicklable(part, error)
    return None


def largest_parts(roots: list[Part], make_pickler: MakePickler) -> str:
    """Return `the largest: `df`, a pandas.DataFrame of 3.1 GB (captured by train)`, or nothing."""
    functions = (types.FunctionType, types.MethodType, functools.partial)
    parts = [inner for root in roots for inner in (_parts(root) if isinstance(root.value, functions) else [root])]
    rehearsed = [(*rehearse(part.value, make_pickler), part) for part in parts]
    sizes = [(size, part) for size, error, part in rehearsed if error is None and size >= WORTH_MENTIONING]
    if not sizes:
        return ""
    size, largest = max(sizes, key=lambda pair: pair[0])
    captured = f" (captured by {largest.functions[-1]})" if largest.functions else ""
    return f"the largest: `{largest.expression}`, {describe_object(largest.value)} of {format_bytes(size)}{captured}"


def _parts(part: Part) -> Iterator[Part]:
    """Yield what pickling a value would pickle in turn."""
    value = part.value
    if isinstance(value, types.FunctionType):
        yield from parts_of_function(part, value)
    elif isinstance(value, types.MethodType):
        method = getattr(value.__func__, "__qualname__", "the method")
        # Within the user's data the expression that leads to the method is clearer than the method's name.
        in_data = part.path and not part.functions
        held = value.__self__
        yield part.inside(".__self__", held) if in_data else Part(held, (*part.functions, method), "self")
        yield dataclasses.replace(part, value=value.__func__)
    elif isinstance(value, functools.partial):
        yield dataclasses.replace(part, value=value.func)
        yield from (part.inside(f".args[{i}]", arg) for i, arg in enumerate(value.args))
        yield from (part.inside(f".keywords[{name!r}]", arg) for name, arg in value.keywords.items())
    elif isinstance(value, (staticmethod, classmethod, _lru_cache_wrapper)):
        yield dataclasses.replace(part, value=value.__wrapped__)
    elif isinstance(value, property):
        accessors = (value.fget, value.fset, value.fdel)
        yield from (dataclasses.replace(part, value=f) for f in accessors if f is not None)
    elif isinstance(value, type):
        members = {name: member for name, member in vars(value).items() if name not in UNPICKLED_MEMBERS}
        yield from (part.inside(f".{name}", member) for name, member in members.items())
        yield from (dataclasses.replace(part, value=base) for base in value.__bases__)
    else:
        yield from _parts_of_data(part, value)


def parts_of_function(part: Part, function: types.FunctionType) -> Iterator[Part]:
    """Yield what a function uses from outside: its closure, globals, defaults and attributes."""
    functions = (*part.functions, function.__qualname__.replace("<locals>.", ""))

    def captured(name: str, value: Any, *, is_default: bool = False, is_global: bool = False) -> Part:
        return Part(value, functions, name, is_default=is_default, is_global=is_global)

    is_ours = function.__globals__ is main_globals()

    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield captured(name, cell.cell_contents)
    for name in globals_of_code(code):
        if name in function.__globals__:
            yield captured(name, function.__globals__[name], is_global=is_ours)
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    for name, value in zip(code.co_varnames[first:], defaults, strict=False):
        yield captured(name, value, is_default=True)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield captured(name, value, is_default=True)
    for name, value in vars(function).items():
        yield captured(f"{function.__name__}.{name}", value)


def _parts_of_data(part: Part, value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield part.inside(f"[{_short(key)}]", item)
            yield part.inside(f" key {_short(key)}", key)
    elif isinstance(value, (list, tuple)):
        yield from (part.inside(f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (part.inside(f"{{{_short(item)}}}", item) for item in value)
    if type(value) not in (dict, list, tuple, set, frozenset):
        yield from _parts_of_object(part, value)


def _parts_of_object(part: Part, value: Any) -> Iterator[Part]:
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # then the object itself is the culprit, or pickled otherwise
        return
    if not isinstance(reduced, tuple):
        return
    parts: list[Any] = [*reduced[1:], None, None, None]
    args, state, items, pairs, *_ = parts
    for states in state if isinstance(state, tuple) else (state,):
        if isinstance(states, dict):
            yield from (part.inside(f".{name}", attribute) for name, attribute in states.items())
        elif states is not None:
            yield dataclasses.replace(part, value=states)
    yield from (dataclasses.replace(part, value=arg) for arg in args or ())
    # The iterator belongs to a reduction made for this search, so reading it is harmless.
    if not isinstance(value, (dict, list)):
        yield from (part.inside(f"[{i}]", item) for i, item in enumerate(items or ()))
        yield from (part.inside(f"[{_short(key)}]", item) for key, item in pairs or ())


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."
