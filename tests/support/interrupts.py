"""A `KeyboardInterrupt` before any one bytecode of a call, as a signal's handler may raise it."""

from __future__ import annotations

import dis
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

INTERRUPTED = ("concurrent.", "contextlib", "notebook_launcher.", "threading")
"""Modules, and beginnings of their names that end with a dot; not those that the collector calls, in which an exception
is lost."""
STRICT = "notebook_launcher."
"""Modules that are interrupted before any bytecode. Python handles a signal only after a call, at the start of a
function and at a jump backwards, and the standard library counts on that where it leaves a `with lock:`."""
HANDLED_AFTER = ("CALL", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "RESUME")


def interrupt_at(number: int, function: Callable[[], object], modules: tuple[str, ...] = INTERRUPTED) -> bool:
    """Call a function and interrupt it before its bytecode number `number`; return whether it came that far."""
    left = number
    beginnings = tuple(name for name in modules if name.endswith("."))
    names: dict[CodeType, list[str]] = {}
    latest: dict[FrameType, int] = {}
    """Index of the bytecode that each frame has executed last."""

    def can_be_interrupted(frame: FrameType, before: int | None) -> bool:
        if frame.f_globals["__name__"].startswith(STRICT):
            return True
        code = frame.f_code
        if code not in names:
            names[code] = [dis.opname[number] for number in code.co_code]
        return before is not None and names[code][before].startswith(HANDLED_AFTER)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "call":
            name = frame.f_globals.get("__name__") or ""
            if name not in modules and not name.startswith(beginnings):
                return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            before = latest.get(frame)
            latest[frame] = frame.f_lasti
            if left < 0 and can_be_interrupted(frame, before):
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
        latest.clear()
    return False
