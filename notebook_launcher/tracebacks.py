"""Tracebacks for a notebook: the frames of the user's code, without this package's, and how to tell the two apart."""

from __future__ import annotations

import contextlib
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from notebook_launcher.ipython_shell import running_shell
from notebook_launcher.wording import MAX_ERROR, bounded, without_colours

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

E = TypeVar("E", bound=BaseException)

PACKAGE = __name__.partition(".")[0]
WHOLE = "import traceback; traceback.print_last() shows all"
# Not resolved: where a link leads to the package, the names of its files in frames go over the link, too.
PACKAGE_FOLDER = Path(__file__).parent
_PREFIX = f"{PACKAGE_FOLDER}/"


def is_ours(filename: str) -> bool:
    """Return True for a file of this package."""
    return filename.startswith(_PREFIX)


def render(error: BaseException, *, whole: bool = False) -> list[str]:
    """Return the lines of an exception's traceback, in the style of the running shell.

    Args:
        error: The exception.
        whole: True to keep the frames of this package. Without these frames the traceback ends where the user's code
            called this package, and the tracebacks of earlier exceptions in the chain begin after them. An earlier
            exception that was raised in this package is left out.
    """
    if whole:
        return _formatted(error, error.__traceback__)
    end_at_caller(error)
    tb = None if error.__traceback__ is None or _is_ours(error.__traceback__) else error.__traceback__
    with _pruned_causes(error):
        return _formatted(error, tb)


def for_caller(error: E) -> E:
    """Have notebooks show an error that the caller's input caused without the frames of this package; return it."""
    # A function that held the error would make a cycle with it.
    error._render_traceback_ = _render_present  # type: ignore[attr-defined]
    return error


def without_locals(error: E) -> E:
    """Clear the variables in the tracebacks of an exception and of its cause, so that they can be kept; return it.

    The frames would hold the values that failed to be built, and open files, for as long as the exception is kept.
    """
    for each in (error, error.__cause__):
        if each is not None:
            traceback.clear_frames(each.__traceback__)
    return error


def end_at_caller(error: BaseException) -> None:
    """Let the traceback of an exception end where the user's code called this package.

    A shell calls this when it shows the exception, so that its `%debug` opens in the user's frames as well.
    """
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        if _is_ours(tb.tb_next):
            tb.tb_next = None
        tb = tb.tb_next


def _render_present() -> list[str]:
    """Return the lines of the traceback of the exception that the shell is about to show."""
    error = sys.exc_info()[1] or sys.last_value
    return [] if error is None else render(error)


def _formatted(error: BaseException, tb: TracebackType | None) -> list[str]:
    shell = running_shell()
    if shell is None:
        lines = "".join(traceback.format_exception(type(error), error, tb)).splitlines()
    elif tb is None or tb.tb_next is None:  # IPython leaves out the first frame, because it is usually IPython's own.
        lines = list(shell.InteractiveTB.get_exception_only(type(error), error))
    else:
        lines = list(shell.InteractiveTB.structured_traceback(type(error), error, tb))
    text = without_colours("\n".join(lines))
    return lines if len(text) <= MAX_ERROR else bounded(text, WHOLE, MAX_ERROR).split("\n")


@contextlib.contextmanager
def _pruned_causes(error: BaseException) -> Iterator[None]:
    """Shorten the tracebacks of earlier exceptions in the chain, inside this block."""
    with contextlib.ExitStack() as undo:
        seen, now = {id(error)}, error
        while (earlier := now.__cause__ or (None if now.__suppress_context__ else now.__context__)) is not None:
            if id(earlier) in seen:
                break
            seen.add(id(earlier))
            undo.callback(earlier.with_traceback, earlier.__traceback__)
            earlier.__traceback__ = _after_ours(earlier.__traceback__)
            if earlier.__traceback__ is None:
                undo.callback(_link, now, now.__cause__, suppress=now.__suppress_context__)
                _link(now, None, suppress=True)
                break
            now = earlier
        yield


def _link(error: BaseException, cause: BaseException | None, *, suppress: bool) -> None:
    error.__cause__ = cause  # This also suppresses the context.
    error.__suppress_context__ = suppress


def _after_ours(tb: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback after the last frame of this package."""
    rest = tb
    while tb is not None:
        if _is_ours(tb):
            rest = tb.tb_next
        tb = tb.tb_next
    return rest


def _is_ours(tb: TracebackType) -> bool:
    return str(tb.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == PACKAGE
