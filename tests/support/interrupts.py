"""A `KeyboardInterrupt` before any one bytecode of a call, as a signal's handler may raise it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["interrupt_at"]

INTERRUPTED = ("concurrent.", "contextlib", "notebook_launcher.", "threading")
"""Modules; not those that the collector calls, in which an exception is lost."""


def interrupt_at(number: int, function: Callable[[], object], modules: tuple[str, ...] = INTERRUPTED) -> bool:
    """Call a function and interrupt it before its bytecode number `number`; return whether it came that far."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_globals["__name__"].startswith(modules):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks only while a trace is set whether anybody wants opcodes
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
