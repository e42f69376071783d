"""An exception as plain data that always travels, whatever the exception object holds."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.messages import ExceptionReport, Frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = ["describe"]

OURS = str(Path(__file__).resolve().parents[1])
MAX_FRAMES = 200
"""Of a recursion, its beginning and its end are kept."""


def describe(error: BaseException) -> ExceptionReport:
    """Return the exception's type, message, chain and frames, without the frames of this package."""
    return _describe(error, set())


def _describe(error: BaseException, seen: set[int]) -> ExceptionReport:
    seen.add(id(error))
    link, earlier = "", None
    if error.__cause__ is not None and id(error.__cause__) not in seen:
        link, earlier = "cause", _describe(error.__cause__, seen)
    elif error.__context__ is not None and not error.__suppress_context__ and id(error.__context__) not in seen:
        link, earlier = "context", _describe(error.__context__, seen)
    inner = getattr(error, "exceptions", ())
    members = inner if isinstance(inner, tuple) and type(error).__name__.endswith("Group") else ()
    return ExceptionReport(
        type_name=_type_name(type(error)),
        message=_message(error),
        frames=tuple(_frames(error.__traceback__)),
        notes=tuple(str(note) for note in getattr(error, "__notes__", ())),
        syntax=_syntax(error),
        link=link,  # type: ignore[arg-type]
        earlier=earlier,
        group=tuple(_describe(member, seen) for member in members),
    )


def _type_name(kind: type) -> str:
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the exception
        return f"<{type(error).__name__} whose str() fails>"


def _syntax(error: BaseException) -> str:
    if not isinstance(error, SyntaxError):
        return ""
    lines = list(traceback.TracebackException(type(error), error, None).format_exception_only())
    return "".join(lines[:-1])


def _frames(tb: TracebackType | None) -> Iterator[Frame]:
    # Our own frames are those above the user's function; one further down means that the user called us.
    extracted = list(traceback.extract_tb(tb))
    while extracted and str(extracted[0].filename).startswith(OURS):
        extracted.pop(0)
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
