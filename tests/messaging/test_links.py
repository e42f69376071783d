"""Links: records over a pair of descriptors, read by a thread of their own or by one that has several of them."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import pytest

from notebook_launcher.messaging import links
from notebook_launcher.messaging.links import Link, LinkError

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = b"x" * 300_000
"""More than a pipe holds."""


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Both ends of a link: the second one receives what the first one sends."""
    read_fd, write_fd = os.pipe()
    with contextlib.ExitStack() as stack:
        sender, receiver = Link(-1, write_fd), Link(read_fd, -1)
        stack.callback(sender.close)
        stack.callback(receiver.close)
        yield sender, receiver


def test_records_that_have_arrived_are_taken_together(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    sender.send("first", {"second": 2})
    receiver.read()
    assert receiver.whole_records() == ["first", {"second": 2}]
    assert receiver.whole_records() == []


def test_record_that_arrives_in_parts_is_taken_once_it_is_whole(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    thread = threading.Thread(target=sender.send, args=("before", LARGE, "after"))
    thread.start()
    records: list[object] = []
    num_reads = 0
    while len(records) < 3:
        receiver.read()
        num_reads += 1
        records += receiver.whole_records()
    thread.join()
    assert records == ["before", LARGE, "after"]
    assert num_reads > 3


def test_stream_without_records_or_lines_is_refused(ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends
    monkeypatch.setattr(links, "LONGEST_LINE", 10)
    os.write(sender._write_fd, (2**62).to_bytes(8, "little"))
    receiver.read()
    assert receiver.next_line() is None
    with pytest.raises(LinkError, match="what arrives are no messages: one would have 4611686018427387904 bytes"):
        receiver.whole_records()
    with pytest.raises(LinkError, match="what arrives are no messages"):
        receiver.receive()
    os.write(sender._write_fd, b"words")
    receiver.read()
    with pytest.raises(LinkError, match="its output begins with a line of more than 10 bytes"):
        receiver.next_line()


def test_record_behind_a_line_is_not_part_of_it(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    os.write(sender._write_fd, b"half")
    receiver.read()
    assert receiver.next_line() is None
    os.write(sender._write_fd, b" a line\n")
    sender.send("record")
    receiver.read()
    assert receiver.next_line() == b"half a line\n"
    assert receiver.whole_records() == ["record"]


def test_end_of_a_link_is_an_error(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    sender.send("last")
    sender.close_sending()
    receiver.read()
    assert receiver.whole_records() == ["last"]
    with pytest.raises(LinkError, match="the link has ended"):
        receiver.read()
    receiver.close()
    with pytest.raises(LinkError, match="Bad file descriptor"):
        receiver.read()
