"""IPython's `%debug`, for the exception of a run: opens the debugger in the rank that failed.

The exception's own frames are in the rank, so the kernel's frames, which `%debug` would show, are of no use. The magic
is replaced while a session is open, and passes everything else on to IPython's own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from notebook_launcher.ipython_shell import running_shell

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

__all__ = ["DebugMagic"]


class DebugMagic:
    """A `%debug` that a session installs, and removes when it is closed.

    Args:
        debug: A method that opens the debugger if the exception belongs to the session's last run, and else returns
            False; held weakly.
    """

    def __init__(self, debug: weakref.WeakMethod[Callable[[BaseException], bool]]) -> None:
        self._debug = debug
        self._is_removed = False
        self._table: dict[str, Any] | None = None
        """IPython's line magics; None while this magic is not installed."""
        self._original: Any = None

    def install(self) -> None:
        """Take the place of `%debug`, if there is an IPython; idempotent.

        IPython loads its own `%debug` for this (15 ms, once), so that it does not take this one's place later.
        """
        shell = running_shell()
        if self._table is not None or self._is_removed or shell is None:
            return
        original = shell.find_line_magic("debug")
        if original is not None:
            self._table, self._original = shell.magics_manager.magics["line"], original
            self._table["debug"] = self

    def remove(self) -> None:
        """Put the original back; idempotent."""
        self._is_removed = True
        table, self._table = self._table, None
        if table is not None and table.get("debug") is self:
            original = self._original
            while isinstance(original, DebugMagic) and original._is_removed:  # noqa: SLF001
                original = original._original  # noqa: SLF001 - of a session that was closed before this one
            table["debug"] = original

    def __call__(self, line: str = "", *args: Any, **options: Any) -> Any:
        """Debug the last exception, as `%debug` does."""
        error = getattr(sys, "last_value", None)
        debug = None if self._is_removed or line.strip() else self._debug()
        if debug is not None and error is not None and debug(error):
            return None
        return self._original(line, *args, **options)
