"""Tests for the fork server's side of a process that waits for a launch."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.messaging import messages
from notebook_launcher.messaging.channel import Channel
from notebook_launcher.processes.spare import Spare
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REQUEST = messages.StartHost(module="some.module", is_interactive=False, needs=())


class Waiting:
    """A spare whose process is this one."""

    def __init__(self, *, keep_for: float) -> None:
        self.lives: list[tuple[str, int]] = []
        self.spare: Spare[str] = Spare(lambda *life: self.lives.append(life), keep_for=keep_for)
        self.spare.expect("some.module")
        self.spare.start(self._live)
        assert self.spare.pid == os.getpid()

    def _live(self, become: Callable[[], None], fd: int) -> int:
        become()
        assert self.lives == [("some.module", fd)]
        self.end = Channel(socket.socket(fileno=fd))
        return os.getpid()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting(keep_for=60.0)
    yield made
    made.spare.dismiss()
    made.end.close()


def test_spare_is_forked_after_idleness() -> None:
    spare: Spare[str] = Spare(lambda *_: None, keep_for=60.0)
    assert spare.next_due(0.2) is None
    spare.expect("some.module")
    assert spare.is_missing
    assert spare.next_due(0.2) == 0.2


def test_spare_is_stale_after_its_time_and_ends_when_it_is_dismissed() -> None:
    waiting = Waiting(keep_for=0.05)
    assert not waiting.spare.is_missing
    until(lambda: waiting.spare.is_stale)
    assert waiting.spare.next_due(0.2) == 0.0
    waiting.spare.dismiss()
    assert waiting.spare.next_due(0.2) is None
    assert waiting.end.receive() is None
    waiting.end.close()


def test_request_goes_to_the_waiting_process_with_its_descriptor(waiting: Waiting) -> None:
    reading, writing = os.pipe()
    assert waiting.spare.take("some.module", REQUEST, writing)
    received = waiting.end.receive()
    assert received is not None
    request, (fd,) = received
    assert request == REQUEST
    os.close(fd)
    assert os.read(reading, 1) == b""  # The fork server's own copy of the descriptor is closed, too.
    assert waiting.end.receive() is None
    assert not waiting.spare.take("some.module", REQUEST, reading)
    os.close(reading)


def test_spare_that_was_taken_is_not_replaced_before_another_launch_is_expected(waiting: Waiting) -> None:
    reading, writing = os.pipe()
    assert waiting.spare.take("some.module", REQUEST, writing)
    os.close(reading)
    assert not waiting.spare.is_missing
    assert waiting.spare.next_due(0.2) is None
    waiting.spare.expect("some.module")
    assert waiting.spare.is_missing


def test_request_of_another_kind_leaves_the_waiting_process(waiting: Waiting) -> None:
    assert not waiting.spare.take("another.module", REQUEST, -1)
    reading, writing = os.pipe()
    assert waiting.spare.take("some.module", REQUEST, writing)
    os.close(reading)


def test_expecting_another_kind_dismisses_the_waiting_process(waiting: Waiting) -> None:
    waiting.spare.expect("another.module")
    assert waiting.spare.is_missing
    assert waiting.end.receive() is None


def test_request_to_a_process_that_has_died_has_no_effect(waiting: Waiting) -> None:
    waiting.end.close()
    reading, writing = os.pipe()
    assert not waiting.spare.take("some.module", REQUEST, writing)
    os.close(writing)
    os.close(reading)
