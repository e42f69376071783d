"""Something that will be known, and waiting for it in a thread that may be interrupted at any bytecode."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AWAKE_EVERY", "Latch"]

AWAKE_EVERY = 0.25
"""Seconds for which an interrupt can be overlooked: one that comes just before a wait begins does not end it."""

T = TypeVar("T")


class Latch(Generic[T]):
    """Set once, by the run's thread; waited for by any.

    The waiters of a `threading.Event` or a `concurrent.futures.Future` share its lock. A `KeyboardInterrupt` inside
    `Condition.__enter__` or `__exit__`, which are Python, leaves that lock locked for good, and the thread that would
    set the event hangs. Here only a deque is shared, whose operations are atomic; each waiter has a lock of its own.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.value: T | None = None
        self._callbacks: collections.deque[Callable[[], object]] = collections.deque()

    def set(self, value: T | None = None) -> None:
        """Wake those who wait, then call what is to be called."""
        self.value = value
        self.is_set = True
        self._call_back()

    def call_when_set(self, callback: Callable[[], object]) -> None:
        """Call it in the thread that sets the latch; at once if it is set already."""
        self._callbacks.append(callback)
        if self.is_set:
            self._call_back()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; return whether it is set."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        waiter = threading.Lock()
        waiter.acquire()
        self._callbacks.appendleft(waiter.release)
        try:
            while not self.is_set and (left := deadline - time.monotonic()) > 0:
                waiter.acquire(timeout=min(left, AWAKE_EVERY))
        finally:
            with contextlib.suppress(ValueError, IndexError):  # Called already, or being called.
                self._callbacks.remove(waiter.release)
        return self.is_set

    def _call_back(self) -> None:
        # Two threads may be here at once: each callback is taken by one of them.
        with contextlib.suppress(IndexError):
            while True:
                _call(self._callbacks.popleft())


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        logging.getLogger(__name__).exception("a callback of a run failed")
