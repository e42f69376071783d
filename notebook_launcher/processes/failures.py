"""Failures in a rank: their reports, and their frames, kept for a debugger."""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import gc
import io
import pdb  # noqa: T100
import re
import sys
import traceback
import types
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar, cast

from notebook_launcher.messaging.messages import ExceptionReport, Frame, KeptFrames
from notebook_launcher.tracebacks import is_ours
from notebook_launcher.travel import cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pdb import Pdb as PlainPdb
    from types import FrameType, TracebackType


# --------------------------------------------------------------------------------------------------------------------
# Describes an exception as plain data that always travels, whatever the exception object holds or does.


T = TypeVar("T")
Link = Literal["cause", "context", ""]

INTERRUPT_HANDLER = "_on_interrupt"
"""The function that Python calls in a rank when the run is stopped, as the innermost frame of the traceback."""
LIBRARY = re.compile("/(site|dist)-packages/")
PICKLING = re.compile(r"/(notebook_launcher|cloudpickle)/|/pickle\.py$")
MAX_FRAMES = 200
"""Frames of a traceback that are kept: the first and the last ones of a recursion."""
MAX_LINKS = 20
"""Exceptions of a chain of causes that are kept: the first and the last ones."""
MAX_EXCEPTIONS = 100
"""Exceptions that are kept in all, including those inside exception groups."""
MAX_TEXT = 20_000
"""Characters of a message or a note."""


def describe_exception(error: BaseException) -> ExceptionReport:
    """Return the exception's type, message, chain and frames, without the frames of this package.

    Never fails: parts that cannot be read are left out.
    """
    bare = ExceptionReport(type_name=type(error).__name__, message=_text(error), frames=())
    return _attempt(lambda: _describe(error, [MAX_EXCEPTIONS]), bare)


def users_place(error: BaseException | None) -> str:
    """Return a clause with the line of the user's own code that raised an error of pickling; else nothing."""
    frames = describe_exception(error).frames if error is not None else ()
    if not frames or PICKLING.search(frames[-1].filename):
        return ""
    return f" It was raised in {frames[-1].name}, {cells.shown_file(frames[-1].filename)}, line {frames[-1].lineno}."


def _describe(error: BaseException, room: list[int]) -> ExceptionReport:
    """Return the report of an exception and those before it; `room` holds how many more there may be."""
    links, half = list(_chain(error)), MAX_LINKS // 2
    num_left_out = max(0, len(links) - MAX_LINKS)
    if num_left_out:
        links[half:-half] = []
    room[0] -= len(links)
    reports = [_describe_one(error, link, room) for error, link in links]
    if num_left_out:
        note = f"{num_left_out:,} exceptions between this one and the one before it are left out."
        reports[half - 1] = dataclasses.replace(reports[half - 1], notes=(*reports[half - 1].notes, note))
    report = reports.pop()
    while reports:
        report = dataclasses.replace(reports.pop(), earlier=report)
    return report


def _describe_one(error: BaseException, link: Link, room: list[int]) -> ExceptionReport:
    notes, members = _notes(error), _members(error)
    group = [_describe(member, room) for member in members if room[0] > 0]
    if len(group) < len(members):
        notes = (*notes, f"{len(members) - len(group):,} of the exceptions inside are left out.")
    return ExceptionReport(
        type_name=_attempt(lambda: _type_name(type(error)), type(error).__name__),
        message=_text(error),
        frames=_attempt(lambda: tuple(_frames(error.__traceback__)), ()),
        notes=notes,
        syntax=_attempt(lambda: _syntax(error), ""),
        link=link,
        group=tuple(group),
    )


def _attempt(get: Callable[[], T], default: T) -> T:
    """Return what `get` returns; the default if it raises: an exception's attributes are user code."""
    try:
        return get()
    except BaseException:  # a broken exception must not hide itself
        return default


def _chain(error: BaseException) -> Iterator[tuple[BaseException, Link]]:
    """Yield the exception and those before it, each with how it is linked to the next."""
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None:
        seen.add(id(now))
        cause, context = now.__cause__, None if now.__suppress_context__ else now.__context__
        link: Link = ""
        earlier = None
        if cause is not None and id(cause) not in seen:
            link, earlier = "cause", cause
        elif context is not None and id(context) not in seen:
            link, earlier = "context", context
        yield now, link
        now = earlier


def _members(error: BaseException) -> tuple[BaseException, ...]:
    if not type(error).__name__.endswith("Group"):
        return ()
    inner: Any = _attempt(lambda: getattr(error, "exceptions", ()), ())
    return tuple(e for e in inner if isinstance(e, BaseException)) if isinstance(inner, tuple) else ()


def _notes(error: BaseException) -> tuple[str, ...]:
    notes: Any = _attempt(lambda: getattr(error, "__notes__", ()), ())
    return tuple(map(_text, notes if isinstance(notes, list | tuple) else (notes,)))


def _type_name(kind: type) -> str:
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(value: object) -> str:
    """Return `str(value)`, without its middle if it is long, as a string that any output can encode."""
    text = _attempt(lambda: str(value), f"<{type(value).__name__} whose str() fails>")
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _syntax(error: BaseException) -> str:
    if not isinstance(error, SyntaxError):
        return ""
    lines = list(traceback.TracebackException(type(error), error, None).format_exception_only())
    return "".join(lines[:-1])


def _frames(tb: TracebackType | None) -> Iterator[Frame]:
    # Our own frames are those above the user's function; one further down means that the user called us.
    extracted = list(traceback.extract_tb(tb))
    while extracted and is_ours(str(extracted[0].filename)):
        extracted.pop(0)
    if extracted and extracted[-1].name == INTERRUPT_HANDLER and is_ours(str(extracted[-1].filename)):
        extracted.pop()
    if len(extracted) > MAX_FRAMES:
        extracted = extracted[: MAX_FRAMES // 2] + extracted[-MAX_FRAMES // 2 :]
    for frame in extracted:
        ends = {name: getattr(frame, name, None) for name in ("end_lineno", "colno", "end_colno")}  # Since Python 3.11.
        yield Frame(filename=frame.filename, lineno=frame.lineno or 0, name=frame.name, line=frame.line or "", **ends)


# --------------------------------------------------------------------------------------------------------------------
# The exception with which a rank's last call ended: kept with its frames, so that a debugger can look into them.


class KeptFailure:
    """Keeps the exception of a call until the next call begins."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    @property
    def is_kept(self) -> bool:
        """True if there is an exception to look into."""
        return self._error is not None

    def keep(self, error: BaseException) -> None:
        """Keep an exception, without the frames of the launcher around the function."""
        with contextlib.suppress(Exception):  # The exception may be frozen.
            error.__traceback__ = _own_frames(error.__traceback__)
        self._error = error

    def measure(self) -> KeptFrames | None:
        """Return the size of the kept frames' tensors; None without an exception, or without a frame of user code.

        Code that cannot be compiled has no frame.
        """
        step = None if self._error is None else self._error.__traceback__
        if step is None or is_ours(step.tb_frame.f_code.co_filename):
            return None
        frames = []
        while step is not None:
            frames.append(step.tb_frame)
            step = step.tb_next
        return KeptFrames(num_frames=len(frames), tensor_bytes=tensor_bytes(frames), gpu_bytes=gpu_bytes())

    def forget(self) -> None:
        """Release the exception and its frames, with all memory that only they hold."""
        if self._error is not None:
            self._error = None
            gc.collect()  # A frame that keeps an exception which passed through it is a cycle, and may hold GPU memory.

    def debug(self, rank: int, ask: Callable[[str], str]) -> None:
        """Open the debugger in the frame that raised, until the user leaves it; return at once if nothing is kept."""
        if self._error is None or self._error.__traceback__ is None:
            return
        debugger = RankPdb(rank, ask, sys.stdout)
        debugger.reset()
        with contextlib.suppress(bdb.BdbQuit, EOFError):  # EOFError: no user answers any more.
            # Since Python 3.13 pdb takes the exception itself, and can show the exceptions that led to it.
            shown: Any = self._error if sys.version_info >= (3, 13) else self._error.__traceback__
            debugger.interaction(None, shown)
        sys.settrace(None)


def _own_frames(step: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame on that is not the launcher's; all of it if every frame is."""
    first = step
    while first is not None and is_ours(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or step


# --------------------------------------------------------------------------------------------------------------------
# Memory that frames hold: the tensors that their variables reach.


MAX_OBJECTS = 100_000
"""Objects that are looked at, which takes 0.1 s at most."""
ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.FunctionType)
"""Types of objects that are not followed: they hold no tensor, or belong to everybody."""


def tensor_bytes(frames: Iterable[types.FrameType]) -> int:
    """Return the bytes of all tensors that the variables of these frames reach, each memory counted once.

    Activations that only autograd holds are not seen.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0
    sizes: dict[tuple[str, int], int] = {}
    for tensor in _tensors(frames, torch.Tensor):
        with contextlib.suppress(Exception):  # Some tensors have no memory of their own.
            storage = tensor.untyped_storage()
            sizes[str(storage.device), storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def gpu_bytes() -> int | None:
    """Return the bytes that torch has allocated on this process's GPU; None if the process uses no GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_allocated())


def _tensors(frames: Iterable[types.FrameType], kind: Any) -> Iterator[Any]:
    todo: list[Any] = [value for frame in frames for value in frame.f_locals.values()]
    seen: set[int] = set()
    while todo and len(seen) < MAX_OBJECTS:
        value = todo.pop()
        if isinstance(value, ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            yield value
            todo.append(value.grad if value.is_leaf else None)
        else:
            with contextlib.suppress(Exception):  # A mapping or a sequence of the user's may raise anything.
                todo += _parts(value)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list((value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).values())


# --------------------------------------------------------------------------------------------------------------------
# `pdb` in a rank: its prompt is answered in the cell.


if not TYPE_CHECKING:
    # ipykernel puts IPython's debugger in the place of Python's, and a rank may be a fork of a kernel.
    PlainPdb = next(cls for cls in pdb.Pdb.__mro__ if cls.__module__ == "pdb")


class RankPdb(PlainPdb):
    """A debugger whose prompt is part of the request for input, so that both are on one line."""

    def __init__(self, rank: int, ask: Callable[[str], str], stdout: Any) -> None:
        # Without nosigint, `continue` would replace the handler of SIGINT, with which a run is stopped.
        super().__init__(
            stdin=cast("IO[str]", _Prompt(self, f"(rank {rank} pdb) ", ask)),
            stdout=stdout,
            skip=["notebook_launcher.*"],
            nosigint=True,
        )
        self.prompt = ""
        self._rank = rank

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Handle an event of the traced code, as `bdb.Bdb`.

        Raises:
            BdbQuit: The user has left the debugger with `q`. The text is printed too, because IPython shows nothing of
                this exception.
        """
        try:
            return super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit:
            text = (
                f"the user has quit the debugger on rank {self._rank}, which ends the run (c leaves the debugger and "
                "continues)"
            )
            self.message(text)
            raise bdb.BdbQuit(text) from None

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the stack and the frame to begin in: of a rank that was interrupted as it waited, the user's own."""
        stack, at = super().get_stack(f, t)
        if t is None or f is not None or len(stack) < 2 or not is_ours(stack[at][0].f_code.co_filename):
            return stack, at
        del stack[at:]  # The handler of the signal.
        files = [frame.f_code.co_filename for frame, _ in stack]
        own = [place for place, file in enumerate(files) if not (is_ours(file) or LIBRARY.search(file))]
        return stack, own[-1] if own else len(stack) - 1

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """Return `Cell In[3](4)train()-> loss.backward()`, with the cell's name in place of its file name."""
        entry = super().format_stack_entry(frame_lineno, lprefix)
        filename = self.canonic(frame_lineno[0].f_code.co_filename)
        return entry.replace(filename, cells.shown_file(filename), 1)


class _Prompt(io.TextIOBase):
    def __init__(self, debugger: pdb.Pdb, prompt: str, ask: Callable[[str], str]) -> None:
        self._debugger = debugger
        self._prompt = prompt
        self._ask = ask

    def readline(self, _size: int | None = -1) -> str:  # type: ignore[override]
        # The `commands` command of pdb sets a prompt of its own for a while.
        return self._ask(self._debugger.prompt or self._prompt) + "\n"
