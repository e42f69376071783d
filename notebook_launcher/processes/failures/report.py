"""Describes an exception as plain data that always travels, whatever the exception object holds or does."""

from __future__ import annotations

import dataclasses
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from notebook_launcher.messaging.messages import ExceptionReport, Frame
from notebook_launcher.tracebacks import is_ours
from notebook_launcher.travel import cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

__all__ = ["describe_exception", "users_place"]

T = TypeVar("T")
Link = Literal["cause", "context", ""]

INTERRUPT_HANDLER = "_on_interrupt"
"""The function that Python calls in a rank when the run is stopped, as the innermost frame of the traceback."""
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
    return _attempt(lambda: _Reporter().describe(error), bare)


def users_place(error: BaseException | None) -> str:
    """Return a clause with the line of the user's own code that raised an error of pickling; else nothing."""
    frames = describe_exception(error).frames if error is not None else ()
    if not frames or PICKLING.search(frames[-1].filename):
        return ""
    return f" It was raised in {frames[-1].name}, {cells.shown_file(frames[-1].filename)}, line {frames[-1].lineno}."


class _Reporter:
    def __init__(self) -> None:
        self._room = MAX_EXCEPTIONS

    def describe(self, error: BaseException) -> ExceptionReport:
        links = list(_chain(error))
        num_left_out = 0
        if len(links) > MAX_LINKS:
            num_left_out = len(links) - MAX_LINKS
            links[MAX_LINKS // 2 : -MAX_LINKS // 2] = []
        self._room -= len(links)
        reports = [self._describe_one(error, link) for error, link in links]
        if num_left_out:
            note = f"{num_left_out:,} exceptions between this one and the one before it are left out."
            gap = reports[MAX_LINKS // 2 - 1]
            reports[MAX_LINKS // 2 - 1] = dataclasses.replace(gap, notes=(*gap.notes, note))
        report = reports.pop()
        while reports:
            report = dataclasses.replace(reports.pop(), earlier=report)
        return report

    def _describe_one(self, error: BaseException, link: Link) -> ExceptionReport:
        notes = _notes(error)
        group: list[ExceptionReport] = []
        members = _members(error)
        for member in members:
            if self._room <= 0:
                notes = (*notes, f"{len(members) - len(group):,} of the exceptions inside are left out.")
                break
            group.append(self.describe(member))
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
        ends = (frame.end_lineno, frame.colno, frame.end_colno) if sys.version_info >= (3, 11) else (None,) * 3
        yield Frame(
            filename=frame.filename,
            lineno=frame.lineno or 0,
            name=frame.name,
            line=frame.line or "",
            end_lineno=ends[0],
            colno=ends[1],
            end_colno=ends[2],
        )
