"""Interrupts that wait for the end of a block which must not be cut short."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["can_hold_interrupts", "held_interrupts"]

OTHERS = (
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGCHLD,
)
"""Signals for which programs have handlers: time limits, profilers, torch's data loader. They may raise."""


def can_hold_interrupts() -> bool:
    """Return True if nothing but an interrupt can raise between any two lines of this thread.

    The user may have a handler for another signal that raises, such as a time limit by SIGALRM.
    """
    if threading.current_thread() is not threading.main_thread():
        return True
    return not any(callable(signal.getsignal(number)) for number in OTHERS)


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold a SIGINT back until the block is over; then the handler that was set before gets it.

    A KeyboardInterrupt in the middle of making a widget leaves half of it in the page. Inside the callback of a weak
    reference, Python prints the exception and drops it. In threads other than the main one this does nothing, because
    Python handles signals in the main thread alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, held[-1])
