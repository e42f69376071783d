"""Tests for calls of a session that the waiting thread carries out by itself, while they take moments."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from notebook_launcher import Session
from notebook_launcher.kernel.latch import can_hold_interrupts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(2, output="none") as session:
        session.run(os.getpid)
        yield session


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that are started during the test."""
    names: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    return names


def test_short_call_starts_no_thread(session: Session, threads: list[str]) -> None:
    for _ in range(20):  # On a busy machine a call may not be short.
        threads.clear()
        assert [*session.run(lambda: 5)] == [5, 5]
        if not threads:
            break
    assert threads == []


def test_longer_call_goes_on_in_a_thread_of_its_own(session: Session, threads: list[str]) -> None:
    def wait() -> int:
        time.sleep(0.2)
        return 5

    assert [*session.run(wait)] == [5, 5]
    assert len(threads) == 1
    assert threads[0].endswith("wait")


def test_interrupt_of_a_call_that_ends_meanwhile_is_not_lost(session: Session, interruptible: None) -> None:
    del interruptible

    def interrupt(kernel: int) -> None:
        if os.environ["RANK"] == "0":
            os.kill(kernel, signal.SIGINT)

    for _ in range(20):
        with pytest.raises(KeyboardInterrupt, match="interrupt was stopped"):
            session.run(interrupt, args=(os.getpid(),))
    assert len(session.run(os.getpid)) == 2


def test_other_handlers_that_may_raise_have_the_call_in_a_thread(session: Session, threads: list[str]) -> None:
    class TooLateError(Exception):
        pass

    def raise_it(*_: Any) -> None:
        raise TooLateError

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        assert not can_hold_interrupts()
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # Not while the call is packed, also on a busy machine.
        with pytest.raises(TooLateError):
            session.run(time.sleep, args=(1.0,))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert threads == ["notebook-launcher sleep"]
    assert can_hold_interrupts()
    until(lambda: "busy" not in repr(session))
    assert len(session.run(os.getpid)) == 2
