"""A value that is set once, and a wait for it that an interrupt can end at any bytecode."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import signal
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


AWAKE_EVERY = 0.25
"""Seconds for which an interrupt may go unnoticed: an interrupt just before a wait begins does not end that wait."""

T = TypeVar("T")


class Latch(Generic[T]):
    """A value that one thread sets once and any thread may wait for.

    The waiters of a `threading.Event` or a `concurrent.futures.Future` share its lock. A `KeyboardInterrupt` inside
    `Condition.__enter__` or `__exit__`, which are written in Python, leaves that lock locked forever, and the thread
    that would set the event hangs. Waiters of a latch share only a deque, whose operations are atomic; each waiter
    has a lock of its own.
    """

    def __init__(self) -> None:
        self.is_set = False
        """True from the moment at which `value` is final."""
        self.value: T | None = None
        """The value; None until it is set."""
        self._callbacks: collections.deque[Callable[[], object]] = collections.deque()
        """Functions to call when the value is set; functions that release a waiter come first."""

    def set(self, value: T | None = None) -> None:
        """Set the value, release the waiters, then call the callbacks."""
        self.value = value
        self.is_set = True
        self._call_back()

    def call_when_set(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the thread that sets the latch; immediately if the latch is set already."""
        self._callbacks.append(callback)
        if self.is_set:
            self._call_back()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; return True if the latch is set."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        waiter = threading.Lock()
        waiter.acquire()
        self._callbacks.appendleft(waiter.release)
        try:
            while not self.is_set and (left := deadline - time.monotonic()) > 0:
                waiter.acquire(timeout=min(left, AWAKE_EVERY))
        finally:
            with contextlib.suppress(ValueError, IndexError):  # It has been called already, or is being called.
                self._callbacks.remove(waiter.release)
        return self.is_set

    def _call_back(self) -> None:
        # Two threads may be here at the same time; each callback is called by one of them.
        with contextlib.suppress(IndexError):
            while True:
                callback = self._callbacks.popleft()
                try:
                    callback()
                except Exception:
                    logging.getLogger(__name__).exception("a callback of a run failed")


# --------------------------------------------------------------------------------------------------------------------
# Interrupts that wait for the end of a block which must not be cut short.


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
