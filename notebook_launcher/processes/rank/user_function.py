"""The call of the user's function, in a process that the function may fork."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any, NoReturn

from notebook_launcher.processes.rank.rank_process import flush

__all__ = ["call_function", "exit_code"]


def call_function(function: Any, args: Any, kwargs: Any) -> Any:
    """Call the function. A child process that the function forked exits here once it leaves the function."""
    pid = os.getpid()
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        if os.getpid() != pid:
            _end_fork(error)
        raise
    if os.getpid() != pid:
        _end_fork(None)
    return value


def _end_fork(error: BaseException | None) -> NoReturn:
    """End a process that the function forked and that has now left the function, as a script ends after its last line.

    The process must not continue as a second rank. Its exit handlers do not run, because they are the rank's.
    """
    code = 1
    try:
        if error is None or isinstance(error, SystemExit):
            code = (exit_code(error) or 0) if error is not None and error.code is not None else 0
        else:
            own = error.__traceback__.tb_next if error.__traceback__ is not None else None
            traceback.print_exception(type(error), error, own)
        flush()
    finally:
        os._exit(code & 0xFF)


def exit_code(error: BaseException) -> int | None:
    """Return the exit code of a `SystemExit`, whose text is printed; None for another exception."""
    if not isinstance(error, SystemExit):
        return None
    if isinstance(error.code, str):
        with contextlib.suppress(Exception):
            sys.stderr.write(f"{error.code}\n")  # As the interpreter does at its end.
    return int(error.code) if isinstance(error.code, int) else 1
